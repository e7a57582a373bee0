"""Preflight: the settings against the outside, before any model loads and any process starts.

Reads files and asks the probes it is given; changes nothing. Every failure is a SettingsError, one line. Of prompt data all rows
are counted, and the first CHECKED_ROWS of each source read as the rooms read them; dialogues to be learned are rendered, too.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

from actors.reward.rules import MATH_RULES, readable_label
from actors.runtime.confine import NO_LANDLOCK, lacking
from actors.runtime.parts import BadRow, parts_of
from actors.runtime.refusals import Refused
from actors.runtime.rows import BadData, PlacedRow, count, image_key, read, sources_of, value_at
from actors.runtime.vision import FAMILIES, family_of
from miles_async.launcher.eval_sets import eval_sets
from miles_async.launcher.fetch import still_to_fetch, with_models
from miles_async.launcher.lora import check_lora
from miles_async.launcher.quick import check_files, check_goes_on, check_gpu, check_weights_there
from miles_async.settings.checks import check_model, check_run_dir, check_trackers, model_context
from miles_async.settings.errors import Refusals, SettingsError, nearest, refusal
from miles_async.settings.functions import SCORE, scores_itself
from miles_async.settings.hub_names import model_name, names_data
from miles_async.settings.programs import check_programs
from miles_async.settings.run import RunSettings

Probe = Callable[[RunSettings], None]
CountTokens = Callable[[Any, Sequence[Any] | None], int]
CHECKED_ROWS = 1000
COMPARE = frozenset(["exact_match", "contains", "f1", *MATH_RULES])
"""Shipped rules that give every answer the same reward where there is no label."""


@dataclass(frozen=True, slots=True)
class DataInfo:
    """What the check found: rows selected by the slices, and the first rows themselves for further checks, each with its place."""

    rows: int
    head: tuple[PlacedRow, ...]


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found: the training prompts, the held-out sets by name, the model's context (None for one not made yet), and what
    is allowed but worth knowing."""

    prompts: DataInfo
    held_out: Mapping[str, DataInfo]
    model_context: int | None
    notes: tuple[str, ...] = ()


def preflight(settings: RunSettings, *, probes: Iterable[Probe] = (), dry_run: bool = False) -> Preflight:
    """Check model directory, memory, data, chat template and the outside, in this order; prompts' lengths follow.

    probes: further checks that raise SettingsError. SettingsError tells all that is wrong.
    """
    from miles_async.launcher.memory import check_memory
    from miles_async.launcher.templates import check_template

    refused = Refusals()
    settings = refused.attempt(with_models, settings, dry_run=True) or settings
    config, data, hints = _quickly(settings, refused, dry_run=dry_run)
    hints += refused.attempt(check_memory, settings, config) or ()
    if data is not None and (config or settings.model.builtin_name):  # else the directory is refused
        hints += refused.attempt(check_template, settings, data[0].head) or ()
    for probe in probes:
        refused.attempt(probe, settings)
    refused.raise_all()
    assert data is not None
    return Preflight(*data, model_context(config), tuple(hints))


def few_prompts(settings: RunSettings, found: Preflight) -> tuple[str, ...]:
    """A note where a batch holds a prompt more than once."""
    rows, batch = found.prompts.rows, settings.rollout.rollout_batch_size
    told = f"{settings.rollout.prompt_data} has {rows} prompts for batches of {batch}: a batch holds some of them more than once"
    told += f" (the data is repeated, as in every epoch; more data or --rollout-batch-size {rows} ends that)"
    return (told,) if 0 < rows < batch else ()


def check_quickly(settings: RunSettings, refused: Refusals) -> None:
    """What can be told without a library: paths, columns, labels, headers of weights, functions' files, GPUs. Adds to `refused`;
    nothing is printed, made or fetched."""
    settings = refused.attempt(with_models, settings, dry_run=True) or settings
    config, _, _ = _quickly(settings, refused, dry_run=True)
    refused.attempt(check_gpu, settings)
    refused.attempt(check_run_dir, settings)
    if config:
        refused.attempt(check_weights_there, settings)
    if not refused.found and not (model_name(settings.model.hf_checkpoint) or names_data(settings.rollout.prompt_data)):
        refused.attempt(check_goes_on, settings)  # what is still to be fetched is compared when it was


def _quickly(
    settings: RunSettings, refused: Refusals, *, dry_run: bool
) -> tuple[dict[str, Any], tuple[DataInfo, dict[str, DataInfo]] | None, list[str]]:
    """config.json, the data, notes."""
    config = refused.attempt(check_model, settings) or {}
    if config:
        refused.attempt(check_lora, settings)
    if config or settings.model.builtin_name:  # else the directory is refused
        refused.attempt(check_files, settings)
    hints = [note for note in (still_to_fetch(settings),) if note]
    hints += refused.attempt(check_programs, settings.flat, dry_run=dry_run) or ()
    hints += kernels_missing(settings)
    hints += refused.attempt(sandbox_missing, settings) or ()
    refused.attempt(check_trackers, settings)
    data = refused.attempt(check_data, settings)
    if data is not None:
        hints += refused.attempt(check_labels, settings, data[0]) or ()
        hints += refused.attempt(check_held_out_labels, settings, data[1]) or ()
    return config, data, hints


def sandbox_missing(settings: RunSettings) -> list[str]:
    """What this kernel lacks for code that a model wrote, where the run has such code: refused, or a note where it goes on."""
    r, missing = settings.rollout, lacking()
    own = [flag for flag in ("environment_sandbox", "custom_rm_sandbox") if getattr(r, flag)]
    ships = (r.rm_type or "").removeprefix("boxed_") == "unit_tests" or "python" in r.tools
    if missing == (NO_LANDLOCK,) and not own:
        return []  # the sandbox itself may have namespaces instead; it says so when it starts
    if not missing or not (own or ships):
        return []
    if not r.allow_weak_sandbox:
        why = f"this kernel lacks {' and '.join(missing)}, and the run has code in a sandbox"
        remedy = "Use a kernel (or container settings) that has it, or set --allow-weak-sandbox to go on without."
        raise refusal("allow_weak_sandbox", False, why, remedy)
    return [f"the sandbox is weak here: this kernel lacks {' and '.join(missing)}, and --allow-weak-sandbox says to go on"]


def kernels_missing(s: RunSettings) -> Iterator[str]:
    """Kernels that were asked for, and are not installed here, in whose place others compute."""
    asked = {name.replace("-", "_"): value for name, value in s.parallel.megatron.items()}.get("attention_backend")
    if asked == "flash" and find_spec("transformer_engine") and not (find_spec("flash_attn") or find_spec("flash_attn_3")):
        yield (
            "attention_backend = flash: the package flash-attn is not installed; Transformer Engine takes what it brings "
            "(cuDNN's). Install flash-attn, or write --attention-backend auto."
        )


def check_data(settings: RunSettings) -> tuple[DataInfo, dict[str, DataInfo]]:
    """Training prompts and every held-out set."""
    r = settings.rollout
    keys = {name: getattr(r, name) for name in ("input_key", "label_key", "metadata_key", "tool_key")}
    keys["multimodal_keys"] = pictures = check_pictures(settings)
    prompts, refused = DataInfo(0, ()), Refusals()  # a function of the user's is tried with the other hooks
    if r.data_source_path is None and not names_data(r.prompt_data):  # else it is looked at when it was fetched
        how = {"chat": r.apply_chat_template, "supervised": settings.flat.supervised, "objects": settings.flat.reads_labels}
        prompts = refused.attempt(check_prompt_data, r.prompt_data, field="prompt_data", keys=keys, **how) or prompts
    if prompts.rows and r.num_rollout is None and r.num_epoch is not None and prompts.rows * r.num_epoch < r.rollout_batch_size:
        why = f"{r.num_epoch} epochs of {prompts.rows} prompts do not fill one rollout"
        remedy = f"Set it to at most {prompts.rows * r.num_epoch}, or set num_rollout."
        raise settings.flat.refusal("rollout_batch_size", why, remedy)
    held_out = {}
    for one in refused.attempt(eval_sets, settings) or ():
        keys = {"eval_input_key": one.input_key, "eval_label_key": one.label_key, "eval_tool_key": one.tool_key}
        keys["multimodal_keys"] = pictures
        field = "eval_prompt_data" if settings.eval.eval_config is None else "eval_config"
        how = {"chat": r.apply_chat_template, "objects": settings.flat.reads_labels}
        found = None if names_data(one.path) else refused.attempt(check_prompt_data, one.path, field=field, keys=keys, **how)
        held_out[one.name] = found or DataInfo(0, ())
    refused.raise_all()
    return prompts, held_out


def check_labels(settings: RunSettings, prompts: DataInfo) -> tuple[str, ...]:
    """Rewards that are all alike teach nothing: a note where no column of labels is named, SettingsError where it is empty."""
    r, s = settings.rollout, settings.flat
    theirs = s.supervised or s.reads_labels
    if r.rm_type is None and not scores_itself(s) and not s.supervised:
        return _rules_named(settings, prompts) if r.metadata_key is not None else ()  # without one it is refused
    if theirs or str(r.rm_type).removeprefix("boxed_") not in COMPARE or not prompts.head:
        return ()
    if r.label_key is None:
        return (f"rm_type = {r.rm_type} compares answers with labels, and label_key is unset: name the column with --label-key",)
    if all(value_at(placed.row, r.label_key) in (None, "") for placed in prompts.head):
        problem = f"none of the first {len(prompts.head)} rows of {r.prompt_data} has a label for rm_type = {r.rm_type}"
        raise settings.flat.refusal("label_key", problem, "Name another column or another --rm-type.")
    keys = {name: getattr(r, name) for name in ("input_key", "label_key", "metadata_key")}
    bad, first = _unread(prompts.head, r.rm_type, keys, {})
    if bad == len(prompts.head):
        problem = f"rm_type = {r.rm_type} can read none of the first {bad} labels of {r.prompt_data} ({first})"
        raise settings.flat.refusal("label_key", problem, "Name another column or another --rm-type.")
    return (_unread_note(r.prompt_data, bad, len(prompts.head), first),) if bad else ()


def _rules_named(settings: RunSettings, prompts: DataInfo) -> tuple[str, ...]:
    """Where no setting names a rule, each row's metadata must: SettingsError where none does, a note where some do not."""
    column, head = settings.rollout.metadata_key or "", prompts.head
    silent = sum(not _at(placed.row, f"{column}.rm_type") for placed in head)
    looked_at = f"of the first {len(head)} rows of {settings.rollout.prompt_data}"
    if head and silent == len(head):
        why = f"nothing scores the samples, and none {looked_at} names a rule (rm_type in the column {column})"
        raise settings.flat.refusal("rm_type", why, SCORE)
    told = f"{silent} {looked_at} name no rule (rm_type in the column {column}): nothing scores their samples"
    return (told,) if silent else ()


def _at(row: Any, key: str) -> Any:
    try:
        return value_at(row, key)
    except KeyError:
        return None


def check_held_out_labels(settings: RunSettings, held_out: Mapping[str, DataInfo]) -> tuple[str, ...]:
    """The same of held-out sets, of which each may have a rule of its own: notes."""
    if settings.flat.supervised or settings.flat.reads_labels:
        return ()
    notes = []
    for one in eval_sets(settings):
        if one.label_key is None:
            continue
        keys = {"input_key": one.input_key, "label_key": one.label_key, "metadata_key": one.metadata_key}
        head = held_out[one.name].head
        bad, first = _unread(head, settings.rollout.rm_type, keys, one.metadata)
        notes += [_unread_note(one.path, bad, len(head), first)] if bad else []
    return tuple(notes)


def _unread(
    head: Sequence[PlacedRow], rule: str | None, keys: Mapping[str, str | None], over: Mapping[str, Any]
) -> tuple[int, str]:
    """How many of these rows have a label that their rule cannot read, and the first of them in words: no answer to such a prompt
    earns anything, and nothing else would say so. `rule`: of rows whose metadata names none; `keys`: the columns by setting, as
    `parts_of` has them; `over`: laid over each row's metadata."""
    found = []
    for at, number, given, padded in head:
        try:
            row = parts_of(given, keys, chat=True, supervised=True, padded=padded, objects=True)
        except BadRow:
            continue  # refused elsewhere
        own = str(over.get("rm_type") or row.metadata.get("rm_type") or rule or "")
        if own and not readable_label(own, row.label):
            found.append(f"{at}, row {number}: {row.label[:60]!r} under {own}")
    return len(found), found[0] if found else ""


def _unread_note(path: str, bad: int, looked_at: int, first: str) -> str:
    why = f"{bad} of the first {looked_at} labels of {path} cannot be read by their rule"
    return f"{why}, so no answer earns anything there ({first})"


def check_pictures(settings: RunSettings) -> str | None:
    """The column of pictures, if there is one; only a model that reads them is shown any."""
    keys, model = settings.rollout.multimodal_keys, settings.model.hf_checkpoint
    try:
        column = image_key(keys)
    except ValueError as error:
        raise SettingsError(str(error), field="multimodal_keys", value=keys) from None
    if column and not settings.flat.on_megatron and not family_of(model):  # with it any pictures are refused
        problem = f"{model} reads no pictures here"
        remedy = f"Choose a model of {' or '.join(FAMILIES)}, or leave the pictures out."
        raise settings.flat.refusal("multimodal_keys", problem, remedy)
    return column or None


def check_prompt_lengths(settings: RunSettings, prompts: DataInfo, count_tokens: CountTokens, model_context: int | None) -> None:
    """Refuse prompts that leave no room for one response token, unless rollout_max_prompt_len leaves them out. count_tokens: of
    one value of input_key, with its tools."""
    r = settings.rollout
    limits = [limit for limit in (r.rollout_max_context_len, model_context) if limit is not None]
    context = min(limits, default=None)
    if not prompts.head or settings.flat.supervised:  # whole dialogues are measured when they are read
        return
    keys = {"input_key": r.input_key, "tool_key": r.tool_key, "multimodal_keys": image_key(r.multimodal_keys)}
    lengths = []
    for at, number, given, padded in prompts.head:
        try:
            row = parts_of(given, keys, chat=r.apply_chat_template, padded=padded)  # keys name no label
            lengths.append(count_tokens(row.prompt, row.tools))
        except Refused as error:
            raise SettingsError(f"{at}, row {number}: {error}", field="prompt_data", value=r.prompt_data) from None
    if r.rollout_max_prompt_len is not None:
        lengths = [length for length in lengths if length <= r.rollout_max_prompt_len]
        if not lengths:
            why = f"every prompt checked in {r.prompt_data} is longer"
            raise settings.flat.refusal("rollout_max_prompt_len", why, "Raise it.")
    longest = max(lengths)
    if context is not None and longest >= context:
        why = f"a prompt of {longest} tokens leaves no space for a response in a context of {context}"
        remedy = f"Set --rollout-max-prompt-len {context - 1} or less to leave such prompts out."
        raise settings.flat.refusal("prompt_data", why, remedy)


def check_prompt_data(
    text: str, *, field: str, keys: dict[str, str | None], chat: bool = True, supervised: bool = False, objects: bool = False
) -> DataInfo:
    """Check what one setting names. `keys`: settings field -> column that must be there (None: not asked for). `chat`: whether
    prompts may be chat messages; `supervised`: they hold the responses too; `objects`: labels may be objects."""
    rows, head, path = 0, list[PlacedRow](), text
    try:
        for source in sources_of(text):
            path = source.path
            chosen, total = count(source)
            if not chosen:
                why = "holds no rows" if total == 0 else f"selects none of the {total} rows"
                raise SettingsError(f"{source.path} {why}", field=field, value=text, remedy="A run needs at least one prompt.")
            rows += chosen
            for placed in islice(read(source), CHECKED_ROWS):
                where = f"{field} {placed.at}, row {placed.number}"
                _check_row(placed.row, keys, where, chat=chat, supervised=supervised, objects=objects)
                head.append(placed)
    except BadData as error:
        named = path == text or path in error.problem  # one of several sources
        problem = error.problem if named else f"{path}: {error.problem}"
        raise SettingsError(problem, field=field, value=text, remedy=error.remedy) from None
    return DataInfo(rows, tuple(head))


def _check_row(row: dict[str, Any], keys: dict[str, str | None], where: str, **how: bool) -> None:
    """SettingsError under the field that names the column."""
    fields = {name.removeprefix("eval_"): name for name in keys}
    try:
        parts_of(row, {name: keys[field] for name, field in fields.items()}, strict=True, **how)
    except BadRow as error:
        hint = nearest(error.key, row) if "has no key" in error.problem else ""
        field = fields[error.setting]  # of held-out prompts another flag than the one that the row's reader names
        named, flag = (f"--{name.replace('_', '-')}" for name in (error.setting, field))
        remedy = error.remedy.replace(named, flag)
        raise refusal(field, error.key, f"{where}: {error.problem}", hint or remedy) from None
