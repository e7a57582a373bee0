"""ROLLOUT: prompts, sampling, rewards, oversampling, partial rollouts and staleness."""

from typing import Annotated, Literal

from miles_async.settings.doc import Group, PositiveInt, doc

SCORERS = (
    *("contains", "dapo", "deepscaler", "deterministic_random", "exact_match", "f1", "finished", "gemma_math", "gpqa"),
    *("ifbench", "judge", "length", "math", "math_boxed", "math_final", "math_whole", "random", "reasoning_gym", "remote_rm"),
    *("unit_tests", "zero"),
)
RM_TYPES = (*SCORERS, *(f"boxed_{name}" for name in SCORERS))
FILTERS = ("none", "check_reward_nonzero_std", "nonzero_std", "no_truncation")
BUFFER_FILTERS = ("fifo", "freshness_first", "restart_stale")

Tool = Literal["calculator", "search", "python"]


class RolloutSettings(Group, frozen=True, kw_only=True):
    """From prompts to scored groups."""

    prompt_data: Annotated[
        str,
        doc(
            "Training prompts: a .jsonl, .csv or .parquet file, a folder of such, a saved data set, a data set of the "
            "Hub as OWNER/NAME[:SPLIT], or "
            "reasoning_gym:NAME?size=500&seed=1. "
            "path@[a:b] takes rows a to b as Python slices do; 3*PATH, 1*PATH mixes several by weight."
        ),
    ]
    data_source_path: Annotated[
        str | None, doc("Dotted path of a function(path) that gives the rows, or of Miles' class with get_samples.")
    ] = None
    input_key: Annotated[str, doc("Column with the prompt: a string, or chat messages.")] = "input"
    label_key: Annotated[str | None, doc("Column with the reference answer, handed to the reward function.")] = None
    metadata_key: Annotated[str | None, doc("Column with a table of extras; its rm_type overrides rm_type for that prompt.")] = None
    tool_key: Annotated[str | None, doc("Column with descriptions of tools, a list of objects, shown by the chat template.")] = None
    multimodal_keys: Annotated[
        str | None,
        doc("""Column with the pictures of a prompt, as a JSON object, {"image": "images"}: paths, data URLs or base64; a message \
shows the next one where it says <image>."""),
    ] = None
    apply_chat_template: Annotated[bool, doc("Render prompts through the tokenizer's chat template.")] = False
    apply_chat_template_kwargs: Annotated[
        str | None, doc('Arguments of the chat template as a JSON object, as in {"enable_thinking": false}.')
    ] = None
    chat_template_path: Annotated[str | None, doc("File with a chat template (Jinja) in place of the tokenizer's own.")] = None
    tools: Annotated[
        tuple[Tool, ...],
        doc(
            "Tools that the model may call over several turns: calculator, search (of tool_corpus), python (in a sandbox).",
            ours=True,
        ),
    ] = ()
    tool_corpus: Annotated[str | None, doc("Texts for the tool search: JSONL with a column text, or a text file.", ours=True)] = (
        None
    )
    max_turns: Annotated[int, doc("Most answers of the model in one sample with tools.", ge=1, ours=True)] = 8
    generate_tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3", "deepseek", "glm", "qwen3_coder", "gpt-oss", "lfm2"],
        doc(
            "Format of tool calls in what the model writes. auto: the one in which the chat template's own rendering of a call is "
            "read back. hermes is Qwen2.5's and Qwen3's, qwen3_coder also Qwen3.5's and Nemotron 3's."
        ),
    ] = "auto"
    custom_agent_function_path: Annotated[
        str | None,
        doc("Dotted path of an agent(task, base_url, api_key) that calls the model as an OpenAI client; returns a reward or None."),
    ] = None
    agent_idle_s: Annotated[
        float,
        doc("Longest time in which an agent neither ends nor waits for the model; then it has failed.", unit="s", gt=0, ours=True),
    ] = 600.0
    rollout_shuffle: Annotated[bool, doc("Shuffle the prompts in a new order each epoch, from rollout_seed.")] = False
    rollout_seed: Annotated[int, doc("Seed of prompt order and token sampling.", ge=0)] = 42
    num_rollout: Annotated[
        PositiveInt | None,
        doc("Rollouts to train on; wins over num_epoch. One of the two is required.", unit="rollouts"),
    ] = None
    num_epoch: Annotated[
        PositiveInt | None,
        doc("Passes over prompt_data; num_rollout = epochs * rows // rollout_batch_size.", unit="epochs"),
    ] = None

    rollout_batch_size: Annotated[
        int,
        doc(
            "Prompt groups per rollout, that is per training batch.",
            unit="groups",
            live="next step (trainer, sampler)",
            ge=1,
        ),
    ] = 32
    n_samples_per_prompt: Annotated[int, doc("Sibling samples per prompt group.", unit="samples", ge=1)] = 8
    over_sampling_batch_size: Annotated[
        int,
        doc(
            "Most prompt groups in generation, at least rollout_batch_size; 0 means what the staleness bound admits. At "
            "max_weight_staleness 0 this many start with each version and the surplus of a batch is dropped.",
            unit="groups",
            live="next group issued (sampler)",
            ge=0,
        ),
    ] = 0
    rollout_temperature: Annotated[
        float,
        doc(
            "Sampling temperature; the trainer divides its logits by it too.",
            live="next group issued (sampler)",
            ge=0.001,
            le=100,
        ),
    ] = 1.0
    rollout_top_p: Annotated[
        float, doc("Nucleus sampling: smallest set with this mass.", live="next group issued (sampler)", gt=0, le=1)
    ] = 1.0
    rollout_top_k: Annotated[int, doc("Sample from the k likeliest tokens; -1 means all.", ge=-1)] = -1
    rollout_max_response_len: Annotated[
        int,
        doc(
            "Most tokens generated per sample; longer ones are cut.",
            unit="tokens",
            live="next group issued (sampler)",
            ge=1,
        ),
    ] = 1024
    rollout_max_prompt_len: Annotated[
        PositiveInt | None, doc("Prompts longer than this are left out of the data set. Unset: none is.", unit="tokens")
    ] = None
    rollout_max_context_len: Annotated[
        PositiveInt | None,
        doc(
            "Most tokens of prompt and response together; a response is cut to what its prompt leaves. Unset: the model's context.",
            unit="tokens",
        ),
    ] = None
    rollout_stop_token_ids: Annotated[tuple[int, ...], doc("Token ids that end a response, beside the tokenizer's end token.")] = ()
    rollout_stop: Annotated[
        tuple[str, ...],
        doc("Texts that end a response. The token that completes one is its last, and is trained; an agent's `stop` goes before."),
    ] = ()

    rollout_skip_special_tokens: Annotated[
        bool,
        doc("Leave special tokens out of the text that reward functions get; the tokens themselves stay as they are."),
    ] = True

    rm_type: Annotated[str | None, doc("Name of a shipped reward function; remote_rm asks rm_url.", shipped=RM_TYPES)] = None
    math_rule: Annotated[
        Literal["math_final", "math_boxed"],
        doc(
            "Which rule the name math stands for, in rm_type, in metadata and for held-out sets: math_final takes the last box, "
            "`answer is`, or the last number for the answer; math_boxed the last box alone, as Miles' math does.",
            ours=True,
        ),
    ] = "math_final"
    custom_rm_path: Annotated[str | None, doc("Dotted path of your own reward function; replaces rm_type.")] = None
    rm_url: Annotated[
        tuple[str, ...],
        doc("Addresses of reward services for rm_type remote_rm, http:// or https://; of several, one that fails is passed by."),
    ] = ()
    rm_batch_size: Annotated[
        int,
        doc("Most samples in one question to rm_url; above 1 it gets a list and gives a list.", unit="samples", ge=1, ours=True),
    ] = 1
    group_rm: Annotated[
        bool, doc("Score all samples of a prompt at once: custom_rm_path and rm_url get a list and give a list.")
    ] = False
    judge_url: Annotated[
        str | None,
        doc(
            "OpenAI-compatible endpoint of the model that scores for rm_type judge, as in http://HOST:PORT/v1. A key that it asks "
            "for is in the variable MILES_ASYNC_JUDGE_KEY.",
            ours=True,
        ),
    ] = None
    judge_model: Annotated[str, doc("Name of the judging model at judge_url.", ours=True)] = "default"
    judge_template_path: Annotated[
        str | None,
        doc("Text that the judge is asked with; {prompt}, {response} and {label} are put in. Unset: a shipped one.", ours=True),
    ] = None
    reward_key: Annotated[str | None, doc("Key of the scalar when the reward function returns a table.")] = None
    reward_version: Annotated[
        int,
        doc(
            "Raise it after a change of the function or the service that scores: functions are loaded anew, groups that are not "
            "judged yet are scored again, and no batch mixes two versions.",
            live="next sample scored, next group judged, next step (reward, filter, trainer)",
            ge=0,
            ours=True,
        ),
    ] = 0
    reward_timeout_s: Annotated[
        float,
        doc(
            "Deadline for scoring one sample; then it is tried again.",
            unit="seconds",
            live="next sample scored (reward)",
            gt=0,
            ours=True,
        ),
    ] = 30.0
    reward_max_retries: Annotated[
        int, doc("Further attempts to score a sample before it becomes a dead letter.", unit="attempts", ge=0, ours=True)
    ] = 3
    num_reward_workers: Annotated[int, doc("Reward scorer processes.", unit="processes", ge=1, ours=True)] = 1

    custom_generate_function_path: Annotated[
        str | None,
        doc("Dotted path of your own rollout program (docs/rollouts.md), or of a generate function written for Miles."),
    ] = None
    rollout_function_path: Annotated[
        str | None,
        doc("Dotted path of Miles' generate_rollout(args, rollout_id, data_source, evaluation), which makes whole groups."),
    ] = None
    environment_path: Annotated[
        str | None,
        doc("Dotted path of a class with reset(task) and step(action): what session.world() of a rollout program asks.", ours=True),
    ] = None
    environment_slots: Annotated[int, doc("Most environments that live at once.", unit="processes", ge=1, ours=True)] = 64
    environment_timeout_s: Annotated[
        float, doc("Longest reset or step of an environment; then it is built anew, once.", unit="seconds", gt=0, ours=True)
    ] = 60.0
    environment_idle_s: Annotated[
        float, doc("Time without a question after which an environment is ended.", unit="seconds", gt=0, ours=True)
    ] = 600.0
    environment_sandbox: Annotated[
        bool,
        doc(
            "Environments write no file and read Python's packages and sandbox_reads only; once their module is loaded they "
            "open no socket and start no process (Linux).",
            ours=True,
        ),
    ] = False
    custom_rm_sandbox: Annotated[
        bool, doc("The same for the function of custom_rm_path; for one that runs or evaluates what the model wrote.", ours=True)
    ] = False
    sandbox_reads: Annotated[
        tuple[str, ...], doc("Files and folders that sandboxed environments and reward functions may read.", ours=True)
    ] = ()
    pass_env: Annotated[
        tuple[str, ...],
        doc("Names of variables that sandboxed environments and reward functions get beside harmless ones as PATH.", ours=True),
    ] = ()
    allow_weak_sandbox: Annotated[
        bool, doc("Go on where the kernel lacks a part of the sandbox, which is told; else code is refused there.", ours=True)
    ] = False
    rollout_timeout_s: Annotated[
        float, doc("Longest run of such a program on one worker; then the sample is tried again.", unit="seconds", gt=0, ours=True)
    ] = 3600.0
    custom_config_path: Annotated[
        str | None, doc("TOML, JSON or YAML file with a table of values that generate functions written for Miles find on args.")
    ] = None

    dynamic_sampling_filter_path: Annotated[
        str,
        doc(
            "Which finished groups are trained: a shipped name (check_reward_nonzero_std drops groups whose rewards "
            "are all equal, none keeps everything) or the dotted path of your own function.",
            live="next group judged (filter)",
            shipped=FILTERS,
            derived="check_reward_nonzero_std; none when n_samples_per_prompt is 1 or a teacher is distilled",
        ),
    ]
    rollout_sample_filter_path: Annotated[
        str | None, doc("Dotted path of Miles' filter(args, groups): samples whose remove_sample it sets are not trained.")
    ] = None
    custom_convert_samples_to_train_data_path: Annotated[
        str | None, doc("Dotted path of Miles' convert(args, samples): gives rewards in place of the group's baseline, loss_masks.")
    ] = None
    rollout_data_postprocess_path: Annotated[
        str | None, doc("Dotted path of Miles' postprocess(args[, data]): changes the loss_masks of the batch's dict of lists.")
    ] = None
    rollout_all_samples_process_path: Annotated[
        str | None, doc("Dotted path of Miles' process(args, groups, data_source): looks at a step's groups, dropped ones too.")
    ] = None
    batch_hook_timeout_s: Annotated[
        float,
        doc(
            "Longest run of a function that sees several samples (a batch, a group to be judged, a buffer to be put in order), and "
            "longest wait for the next row of a data source; then the run ends.",
            unit="seconds",
            gt=0,
            ours=True,
        ),
    ] = 300.0

    max_waves: Annotated[
        int,
        doc(
            "Rollout batches' worth of groups that the filter may reject in a row before the run stops as starved.",
            unit="waves",
            live="next group issued (sampler)",
            ge=1,
            ours=True,
        ),
    ] = 16

    partial_rollout: Annotated[
        bool,
        doc(
            "Continue interrupted samples from their saved prefix. Off: no prefix is saved, and what was interrupted (a worker "
            "drained or lost, an engine that failed, a weight update with pause_generation_mode abort) is generated anew, its "
            "tokens counted as dropped."
        ),
    ] = True
    partial_save_tokens: Annotated[
        int,
        doc(
            "New tokens after which a running sample's prefix is saved.",
            unit="tokens",
            live="next sample started (generation)",
            ge=1,
            ours=True,
        ),
    ] = 512
    mask_offpolicy_in_partial_rollout: Annotated[bool, doc("Give tokens generated before the interruption loss weight 0.")] = False
    buffer_filter_path: Annotated[
        str, doc("Order in which interrupted samples resume: a shipped name or a dotted path.", shipped=BUFFER_FILTERS)
    ] = "fifo"
    max_tokens_per_slice: Annotated[
        PositiveInt | None,
        doc(
            "Tokens after which a sample gives its engine slot back and resumes later. Unset: never.",
            unit="tokens",
            live="next sample started (generation)",
            ours=True,
        ),
    ] = None

    max_weight_staleness: Annotated[
        int,
        doc(
            "Most policy versions between the weights that made a token and the weights being trained. 0 is strictly "
            "on-policy; 1 to 4 overlap generation and training and need an off-policy correction.",
            unit="policy versions",
            live="next group issued, next step (sampler, trainer)",
            ge=0,
            le=1024,
        ),
    ] = 0
    staleness_policy: Annotated[
        Literal["auto", "split", "whole", "member", "wait", "drop"],
        doc(
            "What happens to a group that would cross the bound. split: its finished members are trained on its last turn, "
            "late ones follow when they are done; whole: it is trained when complete, its old tokens masked; member: its "
            "members are trained as soon as half of them are done; wait: the trainer waits for the oldest open group; drop: "
            "it is dropped and its prompt issued again. auto is split, and whole at max_weight_staleness 0.",
            derived="auto; whole where the estimator or a reward hook needs whole groups",
            live="next step, next sample scored (trainer, filter, sampler)",
            ours=True,
        ),
    ]
    staleness_lookahead: Annotated[
        int,
        doc(
            "For staleness_policy wait: how many groups past the oldest open one the trainer may take.",
            unit="groups",
            derived="rollout_batch_size; 1 when max_weight_staleness is 0",
            ge=1,
            ours=True,
        ),
    ]
    update_weights_interval: Annotated[
        int, doc("Rollouts trained between two published policy versions.", unit="rollouts", ge=1)
    ] = 1
