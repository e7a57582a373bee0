"""Flags of Miles for rollouts, data, evaluation and rewards: each is taken, or refused with its own reason."""

from __future__ import annotations

import pytest

from actors.runtime.parts import BadRow, parts_of
from miles_async.settings.catalog import names
from miles_async.settings.miles import needless, why_not

TAKEN = """
--apply-chat-template --apply-chat-template-kwargs --balance-data --buffer-filter-path --chat-template-path
--custom-agent-function-path
--custom-config-path --custom-convert-samples-to-train-data-path --custom-generate-function-path --custom-reward-post-process-path
--custom-rm-path --data-source-path --dynamic-sampling-filter-path --eval-config --eval-input-key --eval-interval --eval-label-key
--eval-max-in-flight --eval-max-response-len --eval-prompt-data --eval-reward-key --eval-temperature --eval-tool-key --eval-top-k
--eval-top-p --generate-tool-call-parser --group-rm --input-key --label-key --metadata-key --n-samples-per-eval-prompt
--n-samples-per-prompt --num-epoch --num-rollout --over-sampling-batch-size --partial-rollout --prompt-data --reward-key --rm-type
--rm-url --rollout-all-samples-process-path --rollout-batch-size --rollout-data-postprocess-path
--rollout-function-path --rollout-max-context-len
--rollout-max-prompt-len --rollout-max-response-len --rollout-sample-filter-path --rollout-seed --rollout-shuffle
--rollout-skip-special-tokens --rollout-stop --rollout-stop-token-ids --rollout-temperature --rollout-top-k --rollout-top-p
--skip-eval-before-train --tool-key --multimodal-keys
"""
REFUSED = {
    "--custom-async-data-buffer-path": "--buffer-filter-path",
    "--custom-rollout-log-function-path": "metrics.md",
    "--eval-function-path": "--eval-config",
    "--eval-num-gpus": "--eval-share",
    "--fetch-trajectory-retry-times": "no service",
    "--generate-execute-tool-function-path": "session.tell",
    "--generate-tool-specs-path": "--tools",
    "--rollout-buffer-url": "no service",
    "--rollout-external": "--engine external",
    "--rollout-submission-granularity": "one by one",
    "--session-message-matcher": "agents.md",
    "--use-session-server": "agents.md",
}
OF_ITS_PARSER = """
--allow-partial-train-step --custom-update-weight-post-write-path --disable-compute-advantages-and-returns --enable-mtp-training
--fp8-format --http-proxy --load-debug-rollout-data-subsample --log-probs-chunk-size --mfu-peak-tflops --min-batch-collection-ratio
--offload-train-disk-chunk-mb --offload-train-disk-dir --opd-log-prob-top-k --opd-reward-weight-mode --opd-teacher-key
--opd-top-k-strategy --opd-topk-per-position --pin-rollout-manager-to-head --prefill-num-servers --recompute-logprobs-via-prefill
--save-local-weight-checksum --skip-actor-forward-only --use-indexer-replay --use-rollout-entropy
"""
"""Flags of Miles that no flag of ours resembles: a likely name would mislead."""


def test_no_flag_of_miles_is_taken_for_a_misspelt_one() -> None:
    assert [flag for flag in OF_ITS_PARSER.split() if not (why_not(flag) or needless(flag))] == []


def test_each_flag_is_taken_or_refused_with_its_own_reason() -> None:
    known = {"--" + name.replace("_", "-") for name in names()}
    assert [flag for flag in TAKEN.split() if flag not in known] == []
    assert {flag: why_not(flag) for flag, says in REFUSED.items() if flag in known or says not in why_not(flag)} == {}


def test_a_prompt_with_a_picture_is_refused_in_one_line() -> None:
    shown = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image", "image": "cat.png"}]}]
    with pytest.raises(BadRow, match=r"'image'.*prompts are text, without pictures or sound"):
        parts_of({"prompt": shown}, {"input_key": "prompt"}, chat=True)
    assert parts_of({"prompt": [{"role": "user", "content": shown[0]["content"][:1]}]}, {"input_key": "prompt"}, chat=True)
