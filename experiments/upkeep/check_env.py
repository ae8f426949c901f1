"""Say what is wrong with an environment: python experiments/upkeep/check_env.py NAME [--set key=value]...

Exit status 0 where nothing is wrong, 1 with one sentence per fault, 2 where there is no such environment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hsg.config.arguments import Parser, refuse


def main(arguments: Sequence[str] | None = None) -> int:
    import yaml

    from hsg import environments
    from hsg.protocol import check_environment

    parser = Parser(
        description="Play a few tasks of an environment and say what breaks hsg's protocol.",
        epilog="example: hsg check-env sciworld --set tasks=Find",
    )
    parser.add_argument("name", help=f"one of {', '.join(environments.available())}, or a module")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the environment")
    parser.add_argument("--num-tasks", type=int, default=3, help="tasks played, spread over all splits (3)")
    try:
        given = parser.parse_args(arguments)
        if given.num_tasks < 1:
            raise ValueError(f"--num-tasks must be >= 1, got {given.num_tasks}")
        options = {}
        for item in given.set:
            key, sign, text = item.partition("=")
            if not (sign and key):
                raise ValueError(f"--set must be of the form key=value, got {item!r}")
            try:
                options[key] = yaml.safe_load(text)
            except yaml.YAMLError:
                options[key] = text
        task_set = environments.make(given.name, **options)
    except ValueError as error:
        return refuse(error)
    try:
        faults = check_environment(task_set, num_tasks=given.num_tasks)
    finally:
        task_set.close()
    for fault in faults:
        print(fault)
    if not faults:
        print(f"{given.name}: nothing is wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
