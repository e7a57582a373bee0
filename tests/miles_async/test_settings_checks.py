"""Preflight against real files: every bad input is one line that names the field, before any model loads."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.reward.rules import RULES, BadLabel
from actors.reward.sample import Sample
from actors.runtime.prompts import load_prompts
from actors.runtime.rows import sources_of, value_at
from actors.runtime.run import Refused
from miles_async.launcher.hooks import PROBES, _sample, check_quantization
from miles_async.launcher.preflight import COMPARE, check_prompt_data, check_prompt_lengths, preflight
from miles_async.quickstart.arithmetic import ARITHMETIC
from miles_async.quickstart.tokenizer import save_tokenizer
from miles_async.settings.custom_config import custom_config
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from miles_async.settings.run import RunSettings
from tests.declared import data_of

ROWS = [{"input": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n", "utf-8")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 256}))
    (path / "tokenizer.json").write_text("{}")
    return path


def make(data: Path | str, **fields: Any) -> RunSettings:
    base = {"hf_checkpoint": "builtin:arithmetic", "num_rollout": 3, "rm_type": "math", "rollout_max_response_len": 64}
    return settings_from(**{**base, "prompt_data": str(data), **fields})


def refusal(settings: RunSettings, **options: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        preflight(settings, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_missing_shards_are_counted_and_named(data, model):
    index = model / "model.safetensors.index.json"
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index.write_text(json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(names)}}))
    for name in names[:1]:
        (model / name).write_bytes(b"")
    text = refusal(make(data, hf_checkpoint=str(model)))
    assert f"2 of 3 checkpoint shards are missing, first {names[1]}" in text and "Download" in text
    index.write_text("[]")
    assert "model.safetensors.index.json cannot be read" in refusal(make(data, hf_checkpoint=str(model)))


def test_a_quantisation_that_cannot_be_published_is_refused(data, model):
    config = {"max_position_embeddings": 256, "quantization_config": {"quant_method": "awq", "bits": 4}}
    (model / "config.json").write_text(json.dumps(config))
    text = refusal(make(data, hf_checkpoint=str(model)), probes=[check_quantization])
    assert "quant_method 'awq'" in text and "block-scaled FP8" in text and str(model) in text
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(config))
    preflight(make(data, hf_checkpoint=str(model)), probes=[check_quantization])
    preflight(make(data), probes=[check_quantization])


def test_where_no_setting_names_a_rule_the_rows_must(tmp_path):
    """A column of metadata without rules passed, and every sample was a dead letter."""
    path = tmp_path / "rows.jsonl"

    def rows(*metadata: object) -> RunSettings:
        path.write_text("".join(json.dumps({"input": "1+1", "answer": "2", "m": each}) + "\n" for each in metadata))
        return make(path, rm_type=None, metadata_key="m", label_key="answer")

    said = refusal(rows({"level": 1}, None))
    assert said.startswith("rm_type = (unset): nothing scores the samples, and none of the first 2 rows of")
    assert "--custom-rm-path" in said
    [note] = preflight(rows({"rm_type": "math"}, '{"rm_type": "math"}', {})).notes
    assert note.startswith("1 of the first 3 rows of") and "name no rule" in note
    assert preflight(rows({"rm_type": "math"})).notes == ()
    assert preflight(make(path, rm_type=None, metadata_key="m", custom_agent_function_path="json.loads")).notes == ()


def test_good_input_passes_and_tells_what_it_found(data, model):
    found = preflight(make(data, hf_checkpoint=str(model), label_key="answer"))
    assert found.prompts.rows == 10
    assert found.prompts.head[3].row == ROWS[3]
    assert found.model_context == 256


@pytest.mark.parametrize(
    ("slice_text", "expected"),
    [
        ("", ROWS),
        ("@[2:5]", ROWS[2:5]),
        ("@[:3]", ROWS[:3]),
        ("@[-2:]", ROWS[-2:]),
        ("@[:]", ROWS),
        ("@[8:99]", ROWS[8:]),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_slices_mean_what_python_means(tmp_path, data, slice_text, expected, suffix):
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "train.parquet")
    path = tmp_path / f"train.{suffix}"
    found = check_prompt_data(f"{path}{slice_text}", field="prompt_data", keys={"input_key": "input"})
    assert (found.rows, [placed.row for placed in found.head]) == (len(expected), expected)


def test_a_path_may_hold_an_at_sign():
    assert sources_of("a@b.jsonl") == sources_of("a@b.jsonl@[:]")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, ("prompt_data", "no such file")),
        ("a.tsv", b"x", (".csv", ".jsonl, .json, .csv, .parquet or .arrow")),
        ("empty.jsonl", b"\n\n", ("prompt_data", "holds no rows")),
        ("bad.jsonl", b'{"input": "a"}\nnot json\n', ("line 2", "is not JSON")),
        ("bytes.jsonl", b'{"input": "\xff"}\n', ("line 1", "is not UTF-8 text")),
        ("list.jsonl", b"[1]\n", ("line 1", "not a JSON object")),
        ("keys.jsonl", b'{"inputs": "a"}\n', ("input_key = 'input'", "Did you mean inputs?")),
        ("blank.jsonl", b'{"input": " "}\n', ("row 1", "non-empty string")),
        ("number.jsonl", b'{"input": 7}\n', ("row 1", "chat messages")),
        ("late.jsonl", b'{"input": "a"}\n\n{"other": "a"}\n', ("row 3", "no key")),
        ("bad.parquet", b"not parquet", ("prompt_data", "not a Parquet file")),
    ],
)
def test_bad_prompt_data_is_refused(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    text = refusal(make(tmp_path / name))
    for word in words:
        assert word in text


def test_bad_slices_and_wrong_keys_are_refused(data):
    assert "selects none of the 10 rows" in refusal(make(f"{data}@[10:]"))
    assert "Write path@[a:b]" in refusal(make(f"{data}@[a:b]"))
    assert "none.jsonl: no such file" in refusal(make(f"{data}, none.jsonl"))
    assert "label_key = 'anwser'" in refusal(make(data, label_key="anwser"))
    held = {"eval_interval": 1, "eval_prompt_data": ["held", str(data)]}
    assert "eval_input_key = 'question'" in (said := refusal(make(data, **held, eval_input_key="question")))
    assert "Set --eval-input-key." in said
    assert "eval_prompt_data" in refusal(make(data, eval_interval=1, eval_prompt_data=["held", "none.jsonl"]))
    assert "rollout_batch_size = 32" in refusal(make(data, num_rollout=None, num_epoch=3))


def test_chat_messages_are_prompts_where_the_template_renders_them(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"input": [{"role": "user", "content": "1+1"}]}) + "\n")
    assert preflight(make(path, apply_chat_template=True)).prompts.rows == 1
    text = refusal(make(path))
    assert "input_key = 'input'" in text and "row 1: the prompt is a list" in text and "--apply-chat-template" in text
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps({"input": "1+1"}) + "\n")
    held = {"eval_interval": 1, "eval_prompt_data": ["held", str(path)]}
    assert "eval_input_key" in refusal(make(plain, **held))


NESTED = {"in": {"text": "1+1="}, "reward_model": {"ground_truth": 2}, "a.b": "3", "a": {"b": "4"}, "m": {"n": {"x": 1}}, "l": [1]}


@pytest.mark.parametrize(
    "keys",
    [
        {"input_key": "in.text", "label_key": "reward_model.ground_truth", "metadata_key": "m.n"},
        {"input_key": "a.b", "label_key": "a.b", "metadata_key": "m"},
        {"input_key": "in.texts"},
        {"input_key": "in.text.more"},
        {"input_key": "in"},
        {"input_key": "in.text", "label_key": "reward_model"},
        {"input_key": "in.text", "label_key": "reward_model.truth"},
        {"input_key": "in.text", "label_key": "l"},
        {"input_key": "in.text", "metadata_key": "a.b"},
    ],
)
def test_the_check_reads_a_row_as_the_rooms_do(tmp_path, keys):
    save_tokenizer(tmp_path, ARITHMETIC)
    path = tmp_path / "nested.jsonl"
    path.write_text(json.dumps(NESTED) + "\n")
    spec = {name: value or "" for name, value in ({"label_key": "", "metadata_key": ""} | keys).items()}
    try:
        [read] = load_prompts(data_of(path=str(path), tokenizer_dir=str(tmp_path), **spec))[0]
    except Refused:
        read = None
    try:
        found = check_prompt_data(str(path), field="prompt_data", keys=keys, chat=False)
    except SettingsError as error:
        found = None
        assert error.field in keys
    assert (found is None) == (read is None)
    if read is not None:
        assert value_at(found.head[0].row, keys["input_key"]) == read.text


def test_hooks_are_tried_with_what_lies_under_a_dotted_key(tmp_path):
    path = tmp_path / "nested.jsonl"
    path.write_text(json.dumps(NESTED) + "\n")
    shown = _sample(make(path, input_key="in.text", label_key="reward_model.ground_truth", metadata_key="m.n"))
    assert (shown["prompt"], shown["label"], shown["metadata"]) == ("1+1=", "2", {"x": 1})


def test_an_unknown_name_lists_the_shipped_ones(data):
    with pytest.raises(SettingsError, match=r"rm_type = 'mth': no such name\. Did you mean math\?"):
        make(data, rm_type="mth")
    with pytest.raises(SettingsError, match="one of none, check_reward_nonzero_std"):
        make(data, dynamic_sampling_filter_path="os")
    make(data, dynamic_sampling_filter_path="my.filters.keep")


def test_bad_model_directories_are_refused(data, model, tmp_path):
    assert "no such directory" in refusal(make(data, hf_checkpoint=str(tmp_path / "nowhere")))
    assert "builtin:arithmetic" in refusal(make(data, hf_checkpoint="builtin:arithmetik"))
    assert "ref_load" in refusal(make(data, hf_checkpoint=str(model), ref_load="nowhere", use_kl_loss=True))
    for file in (".metadata", "common.pt"):
        (tmp_path / file).mkdir()
        (tmp_path / file / file).write_text("")
        given = {"hf_checkpoint": str(model), "ref_load": str(tmp_path / file)}
        assert "torch_dist" in refusal(make(data, **given))
        preflight(make(data, **given, train_backend="megatron"))
    (model / "tokenizer.json").unlink()
    assert "hf_checkpoint" in refusal(make(data, hf_checkpoint=str(model)))
    assert "no tokenizer.json" in refusal(make(data, hf_checkpoint=str(model)))
    (model / "tokenizer.json").write_text("{}")
    for text, said in (("{", "generation_config.json cannot be read"), ("[1]", "generation_config.json is not a JSON object")):
        (model / "generation_config.json").write_text(text)
        assert said in refusal(make(data, hf_checkpoint=str(model)))
    (model / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(make(data, hf_checkpoint=str(model)))


def test_lengths_must_fit_the_model(data, model):
    text = refusal(make(data, hf_checkpoint=str(model), rollout_max_response_len=256))
    assert "rollout_max_response_len = 256" in text and "at most 255" in text
    text = refusal(make(data, hf_checkpoint=str(model), rollout_max_context_len=512))
    assert "rollout_max_context_len = 512" in text and "at most 256" in text


def test_a_prompt_longer_than_the_context_is_refused_unless_it_is_left_out(data):
    def check(**fields: int) -> None:
        settings = make(data, **fields)
        found = preflight(settings)
        check_prompt_lengths(settings, found.prompts, lambda prompt, _: 500 if prompt.startswith("7") else 5, found.model_context)

    with pytest.raises(SettingsError, match=r"500 tokens .* Set --rollout-max-prompt-len 299"):
        check(rollout_max_context_len=300)
    check(rollout_max_context_len=300, rollout_max_prompt_len=200)
    with pytest.raises(SettingsError, match="every prompt"):
        check(rollout_max_prompt_len=4)


def test_a_prompt_that_the_tokenizer_refuses_is_named_by_its_row(data):
    def refuse(prompt: str, _: object) -> int:
        if prompt.startswith("7"):
            raise Refused("it begins with '<s>' already.")
        return 1

    settings = make(data)
    with pytest.raises(SettingsError, match=r"train\.jsonl, row 8: it begins"):
        check_prompt_lengths(settings, preflight(settings).prompts, refuse, None)


def test_probes_are_asked_last_and_their_refusal_counts(data):
    def refuse(settings: RunSettings) -> None:
        raise SettingsError("does not answer", field="bus_url", value=settings.bus.bus_url)

    assert "bus_url" in refusal(make(data, bus_url="redis://localhost:1"), probes=[refuse])


@pytest.mark.parametrize(("text", "says"), [("n: 123456789012345678901234567890", "serialize ints"), ("a: &a [*a]", "recursion")])
def test_a_file_of_own_values_that_cannot_be_sent_is_refused(tmp_path, text, says):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(SettingsError, match=f"own.yaml.*{says}"):
        custom_config(str(tmp_path / "own.yaml"))


def test_a_rule_that_compares_with_labels_needs_some(data: Path, tmp_path: Path) -> None:
    assert any("label_key is unset" in note for note in preflight(make(data)).notes)
    assert not any("label" in note for note in preflight(make(data, label_key="answer")).notes)
    assert not any("label" in note for note in preflight(make(data, rm_type="random")).notes)
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"input": "1+1=", "answer": null}\n{"input": "1+2=", "answer": ""}\n')
    said = refusal(make(empty, label_key="answer"))
    assert "label_key = 'answer'" in said and "none of the first 2 rows of" in said
    preflight(make(empty, label_key="answer", rm_type="finished"))


def test_rules_that_compare_are_those_that_give_all_answers_one_reward_without_a_label() -> None:
    answers = ["2", "\\boxed{2}", "so the answer is 2", "Answer: 2", "</think> \\boxed{3}", "no"]

    def alike(rule: str) -> bool:
        samples = [Sample(sample_id="s/0", prompt="1+1=", response=one, label="", metadata={}) for one in answers]
        try:
            return len({str(RULES[rule](sample)) for sample in samples}) == 1
        except BadLabel:  # it says what it lacks
            return False

    assert {rule for rule in RULES if alike(rule)} - {"finished", "deterministic_random", "zero"} == COMPARE


@pytest.mark.parametrize(
    ("text", "said"), [("[]", "is not a JSON"), ("null", "is not a JSON"), ("{", "cannot be read"), ("\udcff", "cannot be read")]
)
@pytest.mark.parametrize("flags", [{}, {"train_backend": "megatron"}], ids=["torch", "megatron"])
def test_a_config_that_is_none_is_refused_once_by_all_that_look(data: Path, model: Path, text: str, said: str, flags: Any) -> None:
    (model / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert f"config.json {said}" in refusal(make(data, hf_checkpoint=str(model), **flags), probes=PROBES)


def test_labels_that_their_rule_cannot_read_are_told_with_their_share(tmp_path: Path) -> None:
    """Rows of another rule earned 0 for ever, without a word."""
    odd = json.dumps({"func_name": "validate_word", "N": 3})
    mixed = [{"input": "a", "answer": "12"}, {"input": "b", "answer": odd}] * 3
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in mixed))
    told = [note for note in preflight(make(path, label_key="answer")).notes if "cannot be read by their rule" in note]
    said = f"3 of the first 6 labels of {path} cannot be read by their rule, so no answer earns anything there"
    assert told == [f"{said} ({path}, row 2: {odd!r} under math)"]
    owned = [row | {"metadata": {"rm_type": "ifbench"} if "func" in row["answer"] else {}} for row in mixed]
    path.write_text("".join(json.dumps(row) + "\n" for row in owned))
    assert not [n for n in preflight(make(path, label_key="answer", metadata_key="metadata")).notes if "their rule" in n]
    path.write_text(json.dumps(mixed[1]) + "\n")
    assert "can read none of the first 1 labels" in refusal(make(path, label_key="answer"))
    (train := tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    held = {"label_key": "answer", "eval_prompt_data": ("held", str(path)), "eval_label_key": "answer", "eval_interval": 1}
    assert [n for n in preflight(make(train, **held)).notes if f"1 of the first 1 labels of {path}" in n]
