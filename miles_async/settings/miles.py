"""(pure) For users of Miles: which of its flags are ours, which are called or mean something else, and why others are not here."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from miles_async.settings.catalog import PREFIXES, catalog, names, passed_on

OTHERWISE: dict[str, str] = {
    "actor_num_nodes": "more than 1 with launcher ray or train_master",
    "buffer_filter_path": "the function takes (step, waiting) and returns plans",
    "check_weight_update_equal": "a boolean",
    "eval_max_in_flight": "samples of the one evaluation that is under way, not evaluations",
    "custom_config_path": "only what generate functions find on args",
    "custom_generate_function_path": "also (task, session); args.post stands for the call of the engine",
    "custom_loss_function_path": "the function gets log-probs, not logits",
    "custom_convert_samples_to_train_data_path": "of what it gives, rewards and loss_masks count; the rest must be as made",
    "rollout_function_path": "it asks the engine at args.sglang_router_ip; one that comes with Miles is not called",
    "rollout_data_postprocess_path": "it may take the data as its second argument; only loss_masks are taken back",
    "rollout_all_samples_process_path": "it looks only; data_source has no buffer",
    "custom_rm_path": "also (sample), a table",
    "group_rm": "also (samples), a list of tables",
    "dump_details": "the batches, what each rank trained, hashes of each step and the environment",
    "data_source_path": "also a function(path) that gives rows; of a class only get_samples is called",
    "prompt_data": "also several sources with weights, saved data sets, reasoning-gym",
    "dynamic_sampling_filter_path": "also (samples), which returns a reason or nothing; on by default",
    "load": "checkpoints of our own format",
    "loss_mask_type": "also all and last; the template itself says where a message ends",
    "loss_type": "sft_loss is also called sft",
    "load_debug_rollout_data": "msgpack, not torch.save",
    "opd_type": "megatron means: in the trainer",
    "partial_rollout": "on by default",
    "rm_type": "math takes the last box alone in Miles, here as --math-rule says",
    "ref_load": "a Hugging Face directory; for the Megatron backend torch_dist as well",
    "save_debug_rollout_data": "msgpack, not torch.save",
}
"""Fields that have the name of a flag of Miles and another meaning."""
NOT_COMPARED = ("model_name", "megatron_to_hf_mode", "spec", "custom_model_provider_path", "no_rope_fusion",
                "make_vocab_size_divisible_by")  # fmt: skip
"""Fields of the group architecture that config.json says nothing of."""
_RESTARTS = "every actor is restarted and every entry delivered again without being asked"
_BUILTIN = "what it asks for is always so"
NEEDLESS: dict[str, str] = {
    "--use-fault-tolerance": _RESTARTS,
    "--use-miles-dashboard": "the live view, report.html and the trackers show a run (docs/metrics.md)",
    "--no-check-for-nan-in-loss-and-grad": "a step whose gradients are not finite is left out, which costs nothing",
    "--check-for-nan-in-loss-and-grad": _BUILTIN,
    "--disable-compute-advantages-and-returns": "supervised training computes none; any other loss needs them",
    "--disable-wandb-random-suffix": "every start of a run goes on in the same tracker run",
    "--wandb-always-use-train-step": "metrics are counted in training steps",
    "--log-passrate": "pass@k and maj@k are told wherever an evaluation has several samples a prompt",
    "--log-multi-turn": "turns are told wherever samples have several",
    "--use-rollout-entropy": "the entropy is always a metric (train/entropy_loss)",
    "--use-miles-router": "the router is sglang-router",
    "--use-slime-router": "the router is sglang-router",
    "--ci-disable-kl-checker": "--ci-test alone ends a run whose first step fails its check",
    "--ci-disable-logprobs-checker": "--ci-test alone ends a run whose first step fails its check",
    "--disable-rollout-trim-samples": "a batch is cut when it is whole, so nothing is trimmed",
    "--pin-rollout-manager-to-head": "there is no rollout manager (docs/cluster.md)",
    "--use-distributed-post": "each worker asks the engine beside it",
    "--enable-experimental": "what this backend has of Megatron needs no such switch",
    "--no-position-embedding": "positions are rotations in all families, and no table of them is learned",
    "--auto-detect-ckpt-format": _BUILTIN,
    "--enable-mtp-training": "--mtp-num-layers says whether there are layers to predict several tokens",
}
"""Bare flags of Miles that are taken, and have nothing left to do -> why."""
NEEDLESS_VALUES: dict[str, str] = {
    "--num-gpus-per-node": "training ranks are --actor-num-gpus-per-node, engines --rollout-num-gpus",
    "--log-probs-chunk-size": "log-probs are computed in chunks without being asked",
    "--rollout-health-check-interval": _RESTARTS,
    "--rollout-health-check-timeout": _RESTARTS,
    "--rollout-health-check-first-wait": _RESTARTS,
    "--ci-load-grad-norm": "it compares with numbers that Miles recorded",
    "--ci-save-grad-norm": "--debug-determinism records the norm of each step",
    "--max-position-embeddings": "rotations have no longest position; --rollout-max-context-len bounds samples",
    "--seq-length": "samples are packed as long as they are; --rollout-max-context-len bounds them",
    "--ref-micro-batch-size": "--log-probs-max-tokens-per-gpu bounds passes without gradient",
    "--log-reward-category": "all parts of a reward are metrics",
    "--distributed-timeout-minutes": "waits of the trainer have deadlines of their own",
    "--log-interval": "every step is told",
}
"""The same of flags with one value."""
IMPLIES = {"--fully-async": "means --max-weight-staleness 1 --use-tis, or the bound and the correction that are given"}
"""Bare flags of Miles that ask for what settings of ours say -> which. `meant.py` sets them."""
SHORT = {"--bf16": ("model_dtype", "bfloat16")}
"""Bare flags that say a value of a field of ours -> the field and the value."""
SPELT: dict[str, tuple[str, dict[str, str]]] = {
    "--update-weight-transfer-mode": ("update_weight_transport", {"broadcast": "nccl", "disk": "disk"}),
}
"""Flags of Miles that say values of a field of ours in other words -> the field, and its value for each word."""
NO_SUCH_VALUE = {"p2p": "there is no transport that writes into engines' memory by RDMA"}
WHY_NOT: tuple[tuple[str, str], ...] = (
    (
        "The architecture comes from config.json of --hf-checkpoint; leave it out.",
        "--padded-vocab-size --mtp-*",
    ),
    ("Matrices are multiplied in bfloat16; FP8 is for engines.", "--fp8-format"),
    (
        "The Megatron backend has nothing like it.",
        "--moe-* --allgather-cp --megatron-* --distributed-* --custom-megatron-* --qkv-format --indep-dp "
        "--stream-optimizer-* --linear-attention-backend --dsa-* --miles-dsa-* --freeze-indexer --delay-split-train-data-by-dp",
    ),
    ("Each worker asks the engine beside it.", "--http-proxy"),
    ("Use --gradient-checkpointing.", "--recompute-loss-*"),
    ("The trainer computes log-probs itself; --use-rollout-logprobs takes the engines'.", "--recompute-logprobs-via-prefill"),
    ("With one step a rollout no such pass is made.", "--skip-actor-forward-only"),
    ("Metrics tell tokens a second, not their share of a peak.", "--mfu-*"),
    ("--offload-train-target says where the trainer's memory goes: cpu or disk.", "--offload-train-disk-*"),
    ("One teacher tells its log-probs of the tokens that were sampled (--opd-teacher-load, --opd-teacher-urls).",
     "--opd-log-prob-top-k --opd-top-k-strategy --opd-topk-per-position --opd-reward-weight-mode --opd-teacher-key"),
    ("Use --model-dtype bfloat16.", "--extra-high-precision-*"),
    ("All runs here are fully asynchronous; --max-weight-staleness bounds it.", "--async-*"),
    ("It is of a recipe that starts train.py, not of train.py: paths are written whole, the environment is this command's, and "
     "evaluation is on where --eval-interval says.",
     "--output-dir --model-dir --data-dir --local-dir --save-dir --join-ray-workers --cuda-visible-devices --enable-eval"),
    ("The critic is trained beside the policy, by the same processes.", "--critic-*"),
    ("Running engines are given with --engine external --rollout-external-engine-addrs.", "--rollout-external"),
    (
        "A run trains one adapter of whole matrices, under Hugging Face's names, and engines get it merged (docs/lora.md).",
        "--lora-* --multi-lora-* --experts-shared-* --check-lora-*",
    ),
    ("The model is of a family that is not here.", "--dsv4-*"),
    (
        "Tools that ship are --tools; one of yours is asked by a rollout program (session.tell) or belongs to an agent "
        "(--custom-agent-function-path).",
        "--generate-tool-specs-path --generate-execute-tool-function-path --generate-multi-* --generate-max-turns",
    ),
    (
        "Each worker serves its sessions itself (docs/agents.md): a history that goes on is appended to, any other opens a "
        "trajectory, and all of them are trained.",
        "--session-* --use-session-server --tito-*",
    ),
    (
        "Episodes are programs on the bus, so no service collects them.",
        "--rollout-buffer-url --fetch-trajectory-* --rollout-task-type --generate-*",
    ),
    ("A held-out set is generated by the run's program and scored by its rules; --eval-config says how.", "--eval-function-path"),
    ("Metrics are named as docs/metrics.md says, and every start of a run goes on in the same tracker run.",
     "--disable-wandb-* --tb-* "
     "--custom-rollout-log-* --custom-eval-rollout-log-*"),
    ("miles-async samples --best and --worst show kept samples.", "--log-correct-*"),
    ("--data-source-path names a function that gives the rows.", "--disable-rollout-global-dataset"),
    ("A batch is cut when it is whole, so nothing is trimmed.", "--allow-partial-train-step "
     "--min-batch-collection-ratio"),
    ("All rollouts of the recording are trained, --num-rollout of them.", "--load-debug-rollout-data-subsample"),
    ("Engines do both prefill and decode.", "--prefill-num-servers"),
    ("Samples are scheduled one by one.", "--rollout-submission-granularity"),
    ("The bus is the buffer; --buffer-filter-path orders what was interrupted.", "--custom-async-data-buffer-path"),
    ("miles-async trace, doctor and replay look into a run instead.", "--dumper-* --debug-* --memory-* "
     "--save-debug-* --save-local-weight-* --enable-witness --witness-* --enable-event-analyzer --profile-target --observe-*"),
    ("Every actor is restarted and every entry delivered again without being asked.", "--ft-* --mini-ft-* "
     "--control-server-port --ci-ft-*"),
    ("--ci-test checks the first step.", "--ci-*"),
    ("The router is sglang-router.", "--miles-router-* --slime-router-*"),
    ("Choices of sparse attention are not replayed.", "--use-rollout-indexer-replay --use-indexer-replay"),
    ("Evaluation shares the engines (--eval-share), one at a time; how is said by --eval-* and --eval-config.", "--eval-*"),
    ("Versions travel whole, since updates change every matrix: leave out the update as differences.", "--update-weight-mode "
     "--update-weight-delta-* --update-weight-disk-dir --update-weight-local-checkpoint-dir"),
    ("Weights travel as --update-weight-transport says.", "--update-weight-* --p2p-* --mooncake-* --object-store-* "
     "--custom-update-weight-* --rematerialize-* --check-rematerialize-* --check-weight-update-*"),
    ("A reward of 0 is a sample like any other; --rollout-sample-filter-path takes samples out.", "--filter-zero-reward-samples"),
    ("--finetune begins at step 0 with a new optimizer, --ckpt-step N resumes from step N.", "--reset-optimizer-states "
     "--start-rollout-id --low-memory-resume"),
)  # fmt: skip
OWN_PATHS: dict[str, dict[str, str]] = {
    "dynamic_sampling_filter_path": {
        "rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": "check_reward_nonzero_std",
        "rollout.filter_hub.dynamic_sampling_filters.check_no_aborted": "none",
    },
    "buffer_filter_path": {"rollout.data_source.pop_first": "fifo"},
}
"""Setting -> path of a function of Miles or slime -> what is the same here. check_no_aborted: no aborted sample ends a group."""
NOT_HERE = "There is nothing like it here."


def needless(flag: str) -> str:
    """Why a flag of Miles that is taken has nothing left to do; empty for any other."""
    return NEEDLESS.get(flag) or NEEDLESS_VALUES.get(flag, "")


def as_ours(field: str, value: str) -> str:
    """A path into Miles or slime as the name of what ships here and does the same; any other value as it is."""
    for package in ("miles.", "slime."):
        if value.startswith(package):
            return OWN_PATHS.get(field, {}).get(value.removeprefix(package), value)
    return value


def why_not(flag: str) -> str:
    """Why a flag of Miles is not here; empty for what is none of the known."""
    return next((why for why, flags in WHY_NOT if any(fnmatchcase(flag, one) for one in flags.split())), "")


def fate(flag: str) -> str:
    """What becomes of a flag that a launch script of Miles gives, in a few words."""
    spec = names().get(flag.removeprefix("--").replace("-", "_"))
    if flag in SHORT:
        return _long(flag)
    if why := needless(flag):
        return f"taken, without effect: {why}"
    if flag in IMPLIES:
        return IMPLIES[flag]
    if flag in SPELT:
        return _spelt(flag)
    if spec is None or spec.kind == "table":
        kinds = {"megatron": "a field of megatron-core", "server_args": "passed on to SGLang", "router_args": "and to the router"}
        return kinds.get((passed_on(flag) or ("",))[0]) or f"refused: {why_not(flag) or NOT_HERE}"
    if spec.group == "architecture" and spec.name not in NOT_COMPARED:
        return "compared with `config.json`, which decides; may be left out"
    same = flag == spec.flag
    return OTHERWISE.get(spec.name, "the same") if same else f"another name of `{spec.flag}`"


def _long(flag: str) -> str:
    name, value = SHORT[flag]
    return f"another name of `{catalog()[name].flag} {value}`"


def _spelt(flag: str) -> str:
    name, words = SPELT[flag]
    ours = catalog()[name].flag
    return f"another name of `{ours}`: " + ", ".join(f"{theirs} is {value}" for theirs, value in words.items())


def table() -> Iterator[tuple[str, str]]:
    """(flag of Miles, ours or why not) of all, in the order of our settings."""
    ours = {spec.name: spec for spec in catalog().values() if not spec.ours and spec.kind != "table"}
    for name, spec in ours.items():
        yield spec.flag, OTHERWISE.get(name, "the same")
    for alias, spec in names().items():
        if alias != spec.name:
            yield "--" + alias.replace("_", "-"), f"{spec.flag}, which it is another name of"
    for prefixes in PREFIXES.values():
        for prefix in prefixes:
            yield f"{prefix}NAME", f"passed on to the program: {prefixes[0]}NAME"
    for flag in SHORT:
        yield flag, _long(flag)
    for flag, why in (NEEDLESS | NEEDLESS_VALUES).items():
        yield flag, f"taken, without effect: {why}"
    yield from IMPLIES.items()
    for flag in SPELT:
        yield flag, _spelt(flag)
    for why, flags in WHY_NOT:
        for flag in flags.split():
            yield flag, f"not here. {why}"
    yield "any other", f"not here. {NOT_HERE}"
