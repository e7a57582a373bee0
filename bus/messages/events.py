"""Kinds of events: a closed list, each with its level, what it says and what an operator may do.

An event lies on the stream `events` under its kind's value, and in the record as a `fault` where its level is above info. The table
in docs/metrics.md is made from this list (`tests/floors/test_closed.py`), and what is told elsewhere is held against it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

Level = Literal["info", "warning", "error"]


class EventKind(StrEnum):
    """One kind: the value as it is written, `levels` that it may have, the usual one first, `meaning` and `remedy` as parts of a
    sentence, without a full stop. `tail`: what the value is followed by, as in `batch/FLAG`; see `of`.

    Example:
        await context.event(EventKind.CHECKPOINT, "step 40 saved in 1.2 s", step=40)
    """

    levels: tuple[Level, ...]
    meaning: str
    remedy: str
    tail: str

    def __new__(cls, value: str, levels: Level | tuple[Level, ...], meaning: str, remedy: str = "", tail: str = "") -> Self:
        self = str.__new__(cls, value)
        self._value_, self.meaning, self.remedy, self.tail = value, meaning, remedy, tail
        self.levels = (levels,) if isinstance(levels, str) else levels
        return self

    # -- any actor
    NAME_RETAKEN = "name retaken", "info", "an actor was not heard for a while and goes on under its name"
    LEASES_LOST = (
        "leases lost",
        "warning",
        "a peer took over what this actor held",
        "look what held it up: its host, or a loop that stood",
    )
    CLOCK_SET = (
        "clock set",
        "warning",
        "Redis' clock was set, so that all leases begin anew",
        "keep the clock of Redis' host by NTP, which moves it slowly",
    )
    REFUSED = (
        "refused",
        "error",
        "something was passed over, such as a data set that cannot be read",
        "mend what the text names",
    )
    TRIED_AGAIN = (
        "tried again",
        "error",
        "an entry failed and is tried again",
        "mend what the text names, if it goes on",
    )
    DEAD_LETTER = "dead letter", "error", "an entry failed for good", "miles-async bus dead list shows it"
    UNREADABLE = (
        "unreadable",
        "error",
        "a message of a log could not be read and was passed over",
        "look for actors of another release",
    )
    PROMPT_PASSED_OVER = (
        "prompt passed over",
        "error",
        "the pictures of a prompt cannot be shown",
        "mend that row of the data",
    )
    BATCH_HOOK_FAILED = (
        "batch hook failed",
        "error",
        "a function of yours that looks at batches raised or was late",
        "mend it",
    )
    USAGE = "system", "info", "what a host or Redis uses, every 10 s"
    LEAVES = "leaves", "info", "a worker ends because the run has other settings for its workers now", "start it anew"
    # -- sampler
    PROMPTS_LEFT_OUT = (
        "prompts left out",
        "warning",
        "prompts are too long, or have pictures that cannot be shown",
        "mend these rows",
    )
    PROMPTS_CHANGED = (
        "prompts changed",
        "warning",
        "the data has other prompts than the run had",
        "give back the former data, or go on",
    )
    PROMPTS_GONE = "prompts gone", "warning", "groups of a lost bus have no prompt in the data any more: dropped"
    SLOTS_FREED = "slots freed", "info", "groups were closed without the sampler hearing of it"
    ISSUED_AGAIN = "issued again", "info", "the open groups of a lost bus were issued again"
    # -- generation
    JOINED = "joined", "info", "a worker's engine is ready"
    ENGINE_COMPILES = "engine compiles", "info", "SGLang compiles kernels on first use", "wait"
    ENGINE_DEGRADED = (
        "engine degraded",
        "warning",
        "the engine started without something, such as an accelerator",
        "the text says which",
    )
    ENGINE_BOOT_FAILED = (
        *(
            "engine boot failed",
            ("error", "warning"),
            "the engine did not start and is tried again, as a warning in another way",
        ),
        "the text names the cause and the boot folder, which holds command line, environment and log",
    )
    ENGINE_BOOT_REFUSED = (
        *("engine boot refused", "error", "the engine would fail again in the same way"),
        "correct the flag, model or GPU that the text names",
    )
    ENGINE_STALLED = (
        *("engine stalled", "error", "no token within --engine-token-deadline-s, or the engine is gone"),
        "none: its samples were parked and it is started again; look at its log if it comes again",
    )
    ACTIVATED = "activated", "info", "a worker serves a version"
    READY_TO_RECEIVE = "ready to receive", "info", "a worker waits for a version that is sent"
    WEIGHTS_REFUSED = (
        *("weights refused", "error", "a worker cannot load a version: damaged or unreadable files, or another model"),
        "compare its --model-path with the run's",
    )
    TRANSPORT_FAILED = (
        *("transport failed", "warning", "a version that was sent did not arrive; files are tried"),
        "look at the network and NCCL if it comes again",
    )
    NOT_COMPARED = "not compared", "warning", "the engine cannot say checksums of its weights", "an SGLang that can"
    OLD_SIGHT = "old sight", "warning", "the engine may answer about pictures from before the newest weights"
    SLOTS = "slots", "info", "auto changes how many samples a worker takes at once"
    MEMORY_RELEASED = "memory released", "info", "an engine gave its memory to the trainer"
    LENT = "lent", "info", "an engine works on a GPU that the trainer lent"
    ROUTER = (
        "router",
        ("info", "warning"),
        "a worker's engine joined the router, or is unknown to it",
        "look at the router's log",
    )
    # -- router
    ROUTER_READY = "router ready", "info", "sglang-router answers"
    ROUTER_ENDED = "router ended", "error", "sglang-router ended and is started again", "its log says why"
    ROUTER_BOOT_FAILED = (
        "router boot failed",
        "error",
        "sglang-router did not start and is tried again",
        "its log says why",
    )
    # -- reward, environments, filter, partial
    REWARD_VERSION = "reward version", "info", "samples are scored by another version of the reward from here on"
    MATH_RULE = (
        "math rule",
        "info",
        "math-verify is not installed and gives no second look",
        "pip install 'miles-async[math]'",
    )
    ENVIRONMENT_DIED = (
        "environment died",
        "error",
        "an environment of yours ended its process",
        "mend it: the text has its last words",
    )
    JUDGE_RAISED = "judge raised", "error", "the group filter raised, and the group is dropped", "mend the filter"
    POLICY_RAISED = (
        "policy raised",
        "error",
        "the buffer policy raised, and first in, first out is used instead",
        "mend the policy",
    )
    # -- trainer
    RESTORED = "restored", "info", "a checkpoint was loaded"
    CHECKPOINT = "checkpoint", "info", "a checkpoint is durable"
    CHECKPOINT_FAILED = (
        *("checkpoint failed", "error", "a checkpoint was not written; the former one is intact and training goes on"),
        "free the disk or correct --save: the next interval tries again",
    )
    EXPORT = "export", "info", "a Hugging Face model was written (--save-hf)"
    EXPORT_FAILED = (
        "export failed",
        "error",
        "it was not written; training goes on",
        "free the disk or correct --save-hf",
    )
    SELF_CHECK = (
        "self-check",
        ("info", "error"),
        "what the checks of the first step found",
        "docs/troubleshooting.md has each check",
    )
    BATCH = (
        *("batch/", "warning", "what happened to samples of a batch: FLAG says what, the text names them"),
        *("mend a non-finite reward or log-prob", "FLAG"),
    )
    STEP_SKIPPED = (
        *(
            "step skipped",
            "error",
            "the gradient was not finite and weights are unchanged; the batch is tried once more",
        ),
        "mend a NaN in rewards or log-probs, or lower lr",
    )
    BATCH_REFUSED = (
        "batch refused",
        "error",
        "the training library cannot take samples, which are dropped",
        "the text says why",
    )
    BOUND_LOWERED = (
        "bound lowered",
        "info",
        "the staleness bound was lowered: what waits past it loses tokens for a while",
    )
    BATCH_LOWERED = "batch lowered", "info", "the batch was made smaller, with the same effect"
    RULE_CHANGED = "rule changed", "info", "the staleness policy was changed, with the same effect"
    BOUND_REACHED = "bound reached", "info", "the run is within its new bound"
    BOUND_NOT_KEPT = (
        *("bound not kept", "error", "finished samples on their last turn were left out of a batch and lose tokens"),
        "report it: this should not happen",
    )
    KNOBS_REFUSED = (
        "knobs refused",
        "error",
        "the trainer cannot take a live setting; the former values are back",
        "tune to others",
    )
    NOT_WRITTEN = "not written", "warning", "a file of a debug flag was not written; training goes on", "free the disk"
    TRANSFER_FAILED = (
        "transfer failed",
        "warning",
        "a version goes by files, since its group broke",
        "look at the network and NCCL",
    )
    TRANSFER_LATE = "transfer late", "warning", "workers do not say that they have a version", "look at their logs"
    # -- publisher
    ACTIVATION_LATE = (
        "activation late",
        "warning",
        "a worker did not serve a version in time; it is ordered again, in files",
    )
    FILES_LATE = (
        "files late",
        "warning",
        "the trainer was asked to write a version as files and has not",
        "look at the trainer",
    )
    FILES_ANEW = "files anew", "warning", "a version's files were refused and are written anew", "look at the disk"
    WORKER_ASIDE = (
        "worker aside",
        "warning",
        "a worker failed several versions and gets files or none for a while",
        "look at its log",
    )
    NO_SPACE = (
        "no space for old versions",
        "warning",
        "a version is deleted while it may be fetched",
        "more shared memory",
    )
    # -- evaluator, recorder
    EVALUATION = "evaluation", "warning", "the one under way had other data or settings and was given up"
    TRACKER = (
        "tracker",
        ("warning", "info"),
        "a tracker or exporter fails or hangs, or works again",
        "the text says why",
    )
    RECORD_WAITS = "record waits", "error", "the record cannot be written and waits; the run goes on", "free the disk"
    SAMPLE = "sample", "info", "the text of a sample that is kept"
    # -- launcher and command line
    RESTART = "restart", "warning", "an actor ended and is started again", "logs/ACTOR.log has the rest"
    ADOPTED = "adopted", "info", "an actor of an earlier launcher still runs and is kept"
    REPLACED = "replaced", "info", "an actor with other settings or of another release is started anew"
    RETIRED = "retired", "info", "an actor that is not in the settings any more was ended"
    MOVED = "moved", "info", "an actor's place is gone and it is placed anew"
    PLACED = "placed", "info", "where Ray put an actor"
    LEAVING = "leaving", "info", "Ray cannot keep an actor where it is"
    STOP_REQUESTED = "stop requested", "info", "miles-async stop"
    STALL = "stall", ("warning", "error"), "a finding of the doctor that stays", "docs/troubleshooting.md has each rule"
    GOVERNOR = "governor", "info", "the governor changed a setting"
    GOVERNOR_HAND = "governor/hand", "info", "a setting was changed by hand and is left alone"
    GOVERNOR_EDGE = "governor/edge", "info", "a setting is at the end of what it may be", "a wider --governor-* range"
    GOVERNOR_REFUSED = (
        "governor/refused",
        "warning",
        "what would serve is refused with the other settings",
        "the text says why",
    )
    GOVERNOR_UNUSABLE = "governor/unusable", "warning", "a measurement is missing and not used"

    @property
    def level(self) -> Level:
        """The usual one."""
        return self.levels[0]

    @property
    def shown(self) -> str:
        """The value with what follows it: `batch/FLAG`."""
        return self.value + self.tail

    def of(self, what: str) -> str:
        """The kind with what follows it: `EventKind.BATCH.of("stale_tokens")`. ValueError where nothing does."""
        if not self.tail:
            raise ValueError(f"an event {self.value} stands alone")
        return f"{self.value}{what}"
