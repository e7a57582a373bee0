"""What a reward process is started with, and what it scores with: the room, and a shadow that tries another reward beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from actors.reward.blame import Told, untold
from actors.reward.judge import JudgeScorer
from actors.reward.scorer import Scorers
from actors.runtime.run import Refused
from bus.messages.base import Packed, unpack_ints


class RewardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Start-up settings. The deadline of one attempt is the knob reward_timeout_s."""

    tokenizer_dir: str  # holds tokenizer.json
    rm_type: str  # scorer of samples that name none
    math_rule: str  # the rule that the name math stands for
    custom_rm_path: str  # function(sample: dict) -> float | dict, sync or async; replaces rm_type
    custom_rm_sandbox: bool  # that function has the sandbox's limits
    sandbox_reads: tuple[str, ...]  # files that it may read then
    pass_env: tuple[str, ...]  # variables that it has then, beside harmless ones
    allow_weak_sandbox: bool  # go on where the kernel lacks a part
    rm_url: tuple[str, ...]  # services for rm_type remote_rm, which answer alike
    rm_batch_size: int  # samples in one question to them
    judge_url: str  # OpenAI-compatible endpoint for rm_type judge; empty = none
    judge_model: str
    judge_template_path: str
    group_rm: bool  # all samples of a prompt are scored at once
    reward_key: str  # which part of a table is the reward
    eval_reward_key: str  # the same for evaluation; empty = reward_key
    skip_special_tokens: bool = True
    n_workers: int = 2  # verifier processes of a custom function
    concurrency: int = 32  # samples at once when the scorer sets no bound
    max_retries: int = 3  # further attempts before the dead letter, fewer than max_deliveries of the bus
    patience_s: float = 60.0  # with a scorer that fails for every sample; then the run ends with its text
    boot_deadline_s: float = 60.0  # for a verifier process to load its function
    hook_values: dict[str, Any] = {}  # on the `args` of functions written for Miles, beside the settings
    teacher_urls: tuple[str, ...] = ()  # servers asked for log-probs of every training sample; empty = none


def text_by(tokenizer_dir: str, *, skip_special_tokens: bool) -> Callable[[Packed], str]:
    """int32 token ids [n] to the text that is scored. Raises Refused."""
    path = Path(tokenizer_dir) / "tokenizer.json"
    if not path.is_file():
        raise Refused(f"tokenizer_dir {tokenizer_dir!r} has no tokenizer.json; give the model's directory.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class than this
        raise Refused(f"{path} is no tokenizer: {error}") from error
    return lambda tokens: str(tokenizer.decode(unpack_ints(tokens), skip_special_tokens=skip_special_tokens))


def scorers_of(spec: RewardSpec, count: Callable[[str], None], told: Told = untold) -> Scorers:
    """What these settings score with, not entered yet."""
    judge = JudgeScorer(spec.judge_url, model=spec.judge_model, template_path=spec.judge_template_path) if spec.judge_url else None
    alike = (
        *("rm_type", "math_rule", "custom_rm_path", "rm_url", "rm_batch_size", "n_workers", "boot_deadline_s"),
        *("custom_rm_sandbox", "sandbox_reads", "pass_env", "allow_weak_sandbox"),
    )
    return Scorers(judge=judge, count=count, told=told, **{name: getattr(spec, name) for name in alike})
