"""TRL GRPOTrainer + environment_factory on the scripted workload; prints one JSON line.

model.generate runs for real (min_new_tokens = max_new_tokens = A, sampling), then its new tokens are overwritten by the
scripted action, so TRL's own tool loop goes multi-turn.
"""
import argparse, json, os, resource, sys, time, warnings
for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(k, "1")
os.environ.update(TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
warnings.filterwarnings("ignore")
from hsg.experiments.benchmarks import workload as w
ap = argparse.ArgumentParser()
ap.add_argument("--turns", type=int, default=8); ap.add_argument("--spread", type=int, default=2)
ap.add_argument("--G", type=int, default=32); ap.add_argument("--A", type=int, default=16)
ap.add_argument("--steps", type=int, default=3); ap.add_argument("--seed", type=int, default=0)
ap.add_argument("--micro", type=int, default=8, help="per_device_train_batch_size (TRL default 8)")
ap.add_argument("--beta", type=float, default=0.0)
ap.add_argument("--ckpt", action="store_true", help="TRL default gradient_checkpointing=True")
ap.add_argument("--bf16", action="store_true", help="TRL default bf16=True")
ap.add_argument("--top-k", type=int, default=0)
ap.add_argument("--cb", action="store_true", help="use_transformers_continuous_batching")
ap.add_argument("--cb-config", default="{}", help="JSON for transformers_continuous_batching_config")
ap.add_argument("--lr", type=float, default=1e-4)
ap.add_argument("--model", default=str(w.MODEL))
a = ap.parse_args()

import torch
torch.set_num_threads(1)
import tempfile
from datasets import Dataset
from transformers import AutoTokenizer, AutoModelForCausalLM
from transformers.utils import logging as hl
hl.set_verbosity_error(); hl.disable_progress_bar()
from trl import GRPOConfig, GRPOTrainer

spec = w.Spec(G=a.G, turns=a.turns, spread=a.spread, A=a.A, seed=a.seed)
tok = AutoTokenizer.from_pretrained(a.model)
model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
C = {"rollout": [0, 0, 0, 0.0, 0], "ref": [0, 0, 0, 0.0, 0], "train": [0, 0, 0, 0.0, 0]}  # positions, real, attn pairs, seconds in forward, calls
STATE = {"phase": "train", "step": -1, "rows": None, "ids": None, "turn": 0, "digests": [], "gen_s": 0.0, "gen_calls": 0, "lm": 0}
SCRIPT = []
for _k in range(a.steps):
    _r = w.make_rows(spec, _k, tok)
    SCRIPT.append((_r, [[tok(x)["input_ids"] for x in r.actions] for r in _r]))


class Env:
    n = 0

    def __init__(self):
        self._row = Env.n; Env.n += 1
        self._t = 0

    def reset(self, **kw):
        if self._row == 0:
            STATE["step"] += 1; STATE["turn"] = 0
            STATE["rows"], STATE["ids"] = SCRIPT[STATE["step"]]  # built before timing starts
        self._t = 0
        return None

    def act(self, cmd: str) -> str:
        """
        Run one command in the house.

        Args:
            cmd: The command to run, three words.

        Returns:
            What you see after the command.
        """
        r = STATE["rows"][self._row].observations[self._t]
        self._t += 1
        return r

    def get_reward(self):
        return STATE["rows"][self._row].reward


def pre(mod, args, kwargs):
    ids = kwargs.get("input_ids", args[0] if args else None)
    am = kwargs.get("attention_mask"); past = kwargs.get("past_key_values")
    B, q = ids.shape
    kv = q + (past.get_seq_length() if past is not None and hasattr(past, "get_seq_length") else 0)
    c = C[STATE["phase"]]
    c[0] += B * q
    c[1] += int(am[:, -q:].sum()) if (am is not None and am.dim() == 2) else B * q
    c[2] += B * q * kv if q == 1 else B * (q * kv - q * (q - 1) // 2)
    c[4] += 1
    mod._t0 = time.perf_counter()


def post(mod, args, kwargs, out):
    C[STATE["phase"]][3] += time.perf_counter() - mod._t0


def instrument(m):
    m.register_forward_pre_hook(pre, with_kwargs=True); m.register_forward_hook(post, with_kwargs=True)


def script(turn):
    return [STATE["ids"][i][turn] for i in range(spec.G) if len(STATE["ids"][i]) > turn]


def patched_generate(*args, **kw):
    t = time.perf_counter(); STATE["phase"] = "rollout"
    out = real_generate(*args, **kw)
    STATE["phase"] = "train"
    STATE["gen_s"] += time.perf_counter() - t; STATE["gen_calls"] += 1
    want = torch.tensor(script(STATE["turn"]))
    assert out.shape[0] == want.shape[0] and out.shape[1] == kw["input_ids"].shape[1] + spec.A, (out.shape, want.shape)
    out[:, -spec.A:] = want
    STATE["turn"] += 1
    return out


def patched_generate_batch(inputs, *args, **kw):
    t = time.perf_counter(); STATE["phase"] = "rollout"
    out = real_generate_batch(inputs, *args, **kw)
    STATE["phase"] = "train"
    STATE["gen_s"] += time.perf_counter() - t; STATE["gen_calls"] += 1
    want = script(STATE["turn"])
    assert len(out) == len(inputs) == len(want)
    for o, ids in zip(out.values(), want):
        assert len(o.generated_tokens) == spec.A, len(o.generated_tokens)
        o.generated_tokens = list(ids)
    STATE["turn"] += 1
    return out


class Bench(GRPOTrainer):
    T = {"rollout": 0.0, "gen_score": 0.0, "ref": 0.0, "rollout_c": 0.0, "gs_c": 0.0}

    def _generate(self, prompts):
        t, c = time.perf_counter(), time.process_time()
        r = super()._generate(prompts)
        self.T["rollout"] += time.perf_counter() - t; self.T["rollout_c"] += time.process_time() - c
        STATE["digests"].append(w.digest(r[1], r[2]))
        return r

    def _generate_and_score_completions(self, inputs):
        t, c = time.perf_counter(), time.process_time(); r = super()._generate_and_score_completions(inputs)
        self.T["gen_score"] += time.perf_counter() - t; self.T["gs_c"] += time.process_time() - c
        return r

    def _get_per_token_logps_and_entropies(self, model, *args, **kw):
        ref = model is self.ref_model or not torch.is_grad_enabled()
        t = time.perf_counter(); STATE["phase"] = "ref" if ref else "train"
        r = super()._get_per_token_logps_and_entropies(model, *args, **kw)
        STATE["phase"] = "train"
        if ref:
            self.T["ref"] += time.perf_counter() - t
        return r


gk = {"min_new_tokens": a.A, "max_new_tokens": a.A}
if a.cb:
    gk.pop("min_new_tokens")  # continuous batching has no min-length processor; EOS is switched off below
args = GRPOConfig(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=a.micro, gradient_accumulation_steps=a.G // a.micro,
    num_generations=a.G, max_steps=a.steps, learning_rate=a.lr, lr_scheduler_type="constant", max_completion_length=7000,
    beta=a.beta, gradient_checkpointing=a.ckpt, bf16=a.bf16, use_cpu=True, save_strategy="no", report_to=[], logging_steps=1,
    disable_tqdm=True, generation_kwargs=gk, temperature=1.0, top_k=a.top_k, max_grad_norm=1.0, seed=a.seed,
    dataloader_pin_memory=False, use_transformers_continuous_batching=a.cb,
    transformers_continuous_batching_config=json.loads(a.cb_config) if a.cb else None)
ds = Dataset.from_list([{"prompt": w.prompt_messages()}] * max(a.steps, 1))
tr = Bench(model=model, args=args, train_dataset=ds, processing_class=tok, environment_factory=Env)
instrument(tr.model)
if tr.ref_model is not None:
    instrument(tr.ref_model)
real_generate = tr.model.generate; tr.model.generate = patched_generate
if a.cb:
    real_generate_batch = tr.model.generate_batch; tr.model.generate_batch = patched_generate_batch
    tr.generation_config.eos_token_id = -1
import trl.trainer.utils as tu
_ap = tu._ChunkedLogProbFunction.apply
tu._ChunkedLogProbFunction.apply = staticmethod(lambda h, *x: (STATE.__setitem__("lm", STATE["lm"] + h.shape[0]), _ap(h, *x))[1])

# per optimizer step wall: from the start of one step's generation to the end of the optimizer step
from transformers import TrainerCallback
marks = []
SNAP = lambda: dict(w=time.perf_counter(), c=time.process_time(), ro=Bench.T["rollout"], gs=Bench.T["gen_score"], roc=Bench.T["rollout_c"], gsc=Bench.T["gs_c"], ref=Bench.T["ref"],
                    gen=STATE["gen_s"], pr=C["rollout"][0], rr=C["rollout"][1], ar=C["rollout"][2], fr=C["rollout"][3], nr=C["rollout"][4],
                    pt=C["train"][0], rt=C["train"][1], at=C["train"][2], pf=C["ref"][0], lm=STATE["lm"], calls=STATE["gen_calls"])


class Cb(TrainerCallback):
    def on_step_begin(self, *x, **k):
        if not marks: marks.append(SNAP())
    def on_step_end(self, *x, **k): marks.append(SNAP())


tr.add_callback(Cb())
# on_step_begin fires after the batch (and so the rollout) of the first micro step is prepared in some versions: start earlier
marks.append(SNAP())
sys.stdout.flush(); _so = os.dup(1); os.dup2(2, 1)
tr.train()
sys.stdout.flush(); os.dup2(_so, 1)
steps = []
for p, q in zip(marks, marks[1:]):
    d = {k: q[k] - p[k] for k in q}
    steps.append(dict(wall=d["w"], cpu=d["c"], rollout_cpu=d["roc"], train_cpu=d["c"] - d["gsc"], rollout=d["ro"], generate=d["gen"], generate_fwd=d["fr"], rollout_glue=d["ro"] - d["gen"], ref=d["ref"],
                      score_rest=d["gs"] - d["ro"] - d["ref"], train=d["w"] - d["gs"], pos_rollout=d["pr"], real_rollout=d["rr"], pairs_rollout=d["ar"],
                      fwd_calls_rollout=d["nr"], pos_train=d["pt"], real_train=d["rt"], pairs_train=d["at"], pos_ref=d["pf"], lm_head_train=d["lm"], gen_calls=d["calls"]))
rows = SCRIPT[0][0]; p = w.prompt_ids(tok); segs = w.tokenise(rows, tok, spec.A)
logs = [h for h in tr.state.log_history if "grad_norm" in h]
print(json.dumps(dict(bench="trl", args=vars(a), steps=steps, digests=STATE["digests"], grad_norm=[h["grad_norm"] for h in logs],
                      loss=[h["loss"] for h in logs], analytic=w.counts(p, segs),
                      tools=logs[0].get("tools/call_frequency") if logs else None,
                      rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)))
