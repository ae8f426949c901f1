"""How our own instructions ask for each kind of task: three sentences for training, others for the split `rephrasing`.

    {x} {y} {z}  things, {ax} with an article     {a} {b} {c} {d}  places     {looks} {use} {spot}  words.py

Deliberately absent: upstream's sentences; a test holds these against the files where they are there.
"""

from __future__ import annotations

_CONDITIONS = (
    "Is the fridge open? Then {ax} goes to the {b}, else {ay} does.",
    "Look whether the fridge is open: if it is, bring {ax} to the {b}, if not, {ay}.",
    "Put {ax} on the {b} when the fridge stands open and {ay} when it is shut.",
)
TRAINING_TEXTS: dict[str, tuple[str, ...]] = {
    "42f1b012": (
        "Take the {x} from the {a} and put it on the {b}.",
        "Carry the {x} over from the {a} to the {b}.",
        "Fetch the {x} that is on the {a} and set it down on the {b}.",
        "Bring the {x} on the {a} to the {b}.",
    ),
    "f0917e29": (
        "Bring {ax} to the {b}.",
        "Put {ax} on the {b}.",
        "Set {ax} down on the {b}.",
        "Place {ax} on the {b}, please.",
    ),
    "9a1dd6ee": (
        "Take the {x} off the {a}.",
        "Find the {x} on the {a} another place.",
        "Carry the {x} from the {a} to some other place.",
    ),
    "fd8dd56c": (
        "Put {ax} on the {b}, and {ay} too.",
        "Both {ax} and {ay} belong on the {b}.",
        "Two things go to the {b}: {ax} and {ay}.",
    ),
    "6e7f4383": (
        "The {x} on the {a} and the {y} on the {b} have to trade places.",
        "Exchange the {x} on the {a} for the {y} on the {b} and the other way round.",
        "Let the {x} on the {a} and the {y} on the {b} change places.",
    ),
    "6e3da8a1": ("Close the fridge.", "Please shut the fridge door.", "The fridge is open. Close it."),
    "68216d8c": ("Open the fridge.", "Please open the fridge door.", "The fridge is closed. Open it."),
    "311525c5": ("Go and stand at the {b}.", "Walk over to the {b}.", "Move to the {b} and stay there."),
    "2f2d797d": ("Look for {ax}.", "Go where {ax} is.", "Go to the place that has {ax}."),
    "8a66dec9": ("Bring {looks} to the {b}.", "Put {looks} on the {b}."),
    "93b2ef41": ("Take the {x} from the {a} to {spot}.", "Put the {x} that is on the {a} on {spot}."),
    "21e2ce5f": ("I need {use} on the {b}.", "Bring {use} to the {b}."),
    "db3119cd": (
        "Bring {ax} to the {b}, {ay} to the {c} and {az} to the {d}.",
        "Three things: {ax} goes on the {b}, {ay} on the {c}, {az} on the {d}.",
    ),
    "3ef02c70": ("Every {x} goes to the {b}, wherever it is.", "Each {x} of the house goes on the {b}."),
    "92bcf9b3": ("No {x} stays on the {a}: all go to the {b}.", "Each {x} on the {a} goes on the {b}."),
    "5d5460d6": _CONDITIONS,
    "e75d9d69": _CONDITIONS,
}
REPHRASED_TEXTS: dict[str, tuple[str, ...]] = {
    "42f1b012": (
        "My {x} was left on the {a}, and its place is the {b}.",
        "The {b} is where I want the {x} from the {a}.",
    ),
    "f0917e29": ("The {b} lacks {ax}.", "I would like to see {ax} on the {b}."),
    "9a1dd6ee": ("There should be no {x} on the {a}.", "I do not want to see the {x} on the {a} any more."),
    "fd8dd56c": ("What I miss on the {b} are {ax} and {ay}.", "The {b} could do with {ax} and {ay}."),
    "6e7f4383": (
        "The {x} lies on the {a} and the {y} on the {b}, but it should be the other way round.",
        "Someone mixed up the {x} on the {a} and the {y} on the {b}: put that right.",
    ),
    "6e3da8a1": ("It gets warm in the fridge.", "Somebody forgot the fridge door after breakfast."),
    "68216d8c": ("The milk wants to go back into the cold.", "I want to look into the fridge."),
    "311525c5": ("Wait for me by the {b}.", "You are needed at the {b}."),
    "2f2d797d": ("Where do I have {ax}? Stand by it.", "I have lost {ax}. Show me where it is."),
}
MISLEADING = (
    "There is {ay} somewhere, which nobody needs. {text}",
    "Leave {ay} alone. {text}",
    "{text} It has nothing to do with {ay}.",
)
