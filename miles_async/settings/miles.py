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
    "ref_load": "a Hugging Face directory; for the Megatron backend torch_dist as well",
    "save_debug_rollout_data": "msgpack, not torch.save",
}
"""Fields that have the name of a flag of Miles and another meaning."""
NOT_COMPARED = ("model_name", "megatron_to_hf_mode", "spec", "custom_model_provider_path", "no_rope_fusion",
                "make_vocab_size_divisible_by")  # fmt: skip
"""Fields of the group architecture that config.json says nothing of."""
NEEDLESS: dict[str, str] = {
    "--use-fault-tolerance": "every actor is restarted and every entry delivered again without being asked",
    "--fully-async": "it means --max-weight-staleness 1 --use-tis where no bound is given",
    "--use-miles-dashboard": "the live view, report.html and the trackers show a run (docs/metrics.md)",
}
"""Bare flags of Miles that are taken, and have nothing left to do -> why."""
SHORT = {"--bf16": ("model_dtype", "bfloat16")}
"""Bare flags that say a value of a field of ours -> the field and the value."""
WHY_NOT: tuple[tuple[str, str], ...] = (
    (
        "The architecture comes from config.json of --hf-checkpoint; leave it out.",
        "--padded-vocab-size --mtp-*",
    ),
    ("Layers that predict several tokens are not trained.", "--enable-mtp-training"),
    ("Matrices are multiplied in bfloat16; FP8 is for engines.", "--fp8-format"),
    (
        "The Megatron backend has nothing like it.",
        "--moe-* --allgather-cp --megatron-* --distributed-* --custom-megatron-* --qkv-format --indep-dp "
        "--stream-optimizer-* --linear-attention-backend --dsa-* --miles-dsa-* --freeze-indexer --delay-split-train-data-by-dp",
    ),
    ("Each worker asks the engine beside it.", "--use-distributed-post --http-proxy"),
    ("Use --gradient-checkpointing.", "--recompute-loss-*"),
    ("Log-probs are computed in chunks without being asked.", "--log-probs-chunk-size"),
    ("The trainer computes log-probs itself; --use-rollout-logprobs takes the engines'.", "--recompute-logprobs-via-prefill"),
    ("With one step a rollout no such pass is made.", "--skip-actor-forward-only"),
    ("Metrics tell tokens a second, not their share of a peak.", "--mfu-*"),
    ("The entropy is always a metric (train/entropy_loss).", "--use-rollout-entropy"),
    ("--loss-type sft_loss needs none, and computes none.", "--disable-compute-advantages-and-returns"),
    ("--offload-train-target says where the trainer's memory goes: cpu or disk.", "--offload-train-disk-*"),
    ("One teacher tells its log-probs of the tokens that were sampled (--opd-teacher-load, --opd-teacher-urls).",
     "--opd-log-prob-top-k --opd-top-k-strategy --opd-topk-per-position --opd-reward-weight-mode --opd-teacher-key"),
    ("Use --model-dtype bfloat16.", "--extra-high-precision-*"),
    ("All runs here are fully asynchronous; --max-weight-staleness bounds it.", "--async-*"),
    ("Training ranks are --actor-num-gpus-per-node, engines --rollout-num-gpus.", "--num-gpus-per-node"),
    ("It is of a recipe that starts train.py, not of train.py: paths are written whole, the environment is this command's, and "
     "evaluation is on where --eval-interval says.",
     "--output-dir --model-dir --data-dir --local-dir --cuda-visible-devices --enable-eval"),
    ("The critic is trained beside the policy, by the same processes.", "--critic-*"),
    ("Running engines are given with --engine external --rollout-external-engine-addrs.", "--rollout-external"),
    ("There is no LoRA.", "--lora-* --multi-lora-* --target-modules --exclude-modules --experts-shared-* --*-lora-*"),
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
        "--rollout-buffer-url --fetch-trajectory-* --rollout-task-type --log-multi-turn --generate-*",
    ),
    ("A held-out set is generated by the run's program and scored by its rules; --eval-config says how.", "--eval-function-path"),
    ("Metrics are named as docs/metrics.md says, and every start of a run goes on in the same tracker run.",
     "--wandb-always-use-train-step --disable-wandb-* --tb-* --log-reward-category "
     "--custom-rollout-log-* --custom-eval-rollout-log-*"),
    ("pass@k and maj@k are told wherever an evaluation has several samples a prompt.", "--log-passrate"),
    ("miles-async samples --best and --worst show kept samples.", "--log-correct-*"),
    ("--data-source-path names a function that gives the rows.", "--disable-rollout-global-dataset"),
    ("A batch is cut when it is whole, so nothing is trimmed.", "--disable-rollout-trim-samples --allow-partial-train-step "
     "--min-batch-collection-ratio"),
    ("All rollouts of the recording are trained, --num-rollout of them.", "--load-debug-rollout-data-subsample"),
    ("Engines do both prefill and decode.", "--prefill-num-servers"),
    ("There is no rollout manager; docs/cluster.md tells what runs where.", "--pin-rollout-manager-to-head"),
    ("Samples are scheduled one by one.", "--rollout-submission-granularity"),
    ("The bus is the buffer; --buffer-filter-path orders what was interrupted.", "--custom-async-data-buffer-path"),
    ("miles-async trace, doctor and replay look into a run instead.", "--dumper-* --debug-* --memory-* "
     "--save-debug-* --save-local-weight-* --enable-witness --witness-* --enable-event-analyzer --profile-target --observe-*"),
    ("Every actor is restarted and every entry delivered again without being asked.", "--ft-* --mini-ft-* "
     "--control-server-port --rollout-health-check-* --ci-ft-*"),
    ("--ci-test checks the first step.", "--ci-*"),
    ("The router is sglang-router.", "--use-miles-router --miles-router-*"),
    ("Choices of sparse attention are not replayed.", "--use-rollout-indexer-replay --use-indexer-replay"),
    ("Evaluation shares the engines (--eval-share), one at a time; how is said by --eval-* and --eval-config.", "--eval-*"),
    ("Weights travel as --update-weight-transport says.", "--update-weight-* --p2p-* --mooncake-* --object-store-* "
     "--custom-update-weight-* --rematerialize-* --check-rematerialize-* --check-weight-update-* --check-lora-*"),
    ("--finetune begins at step 0 with a new optimizer, --ckpt-step N resumes from step N.", "--reset-optimizer-states "
     "--start-rollout-id --low-memory-resume"),
)  # fmt: skip
NOT_HERE = "There is nothing like it here."


def why_not(flag: str) -> str:
    """Why a flag of Miles is not here; empty for what is none of the known."""
    return next((why for why, flags in WHY_NOT if any(fnmatchcase(flag, one) for one in flags.split())), "")


def fate(flag: str) -> str:
    """What becomes of a flag that a launch script of Miles gives, in a few words."""
    spec = names().get(flag.removeprefix("--").replace("-", "_"))
    if flag in SHORT:
        return _long(flag)
    if flag in NEEDLESS:
        return f"taken, without effect: {NEEDLESS[flag]}"
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
    for flag, why in NEEDLESS.items():
        yield flag, f"taken, without effect: {why}"
    for why, flags in WHY_NOT:
        for flag in flags.split():
            yield flag, f"not here. {why}"
    yield "any other", f"not here. {NOT_HERE}"
