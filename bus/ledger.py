"""The ledger: every issued sample and every generated token is in exactly one account: trained, dropped, or pending.

Reads  the hashes ledger and open, the streams between sampler and trainer    Owns  the names of the accounts
Accounts move only inside commits, so issued = trained + dropped + pending at every instant, also after crashes. `check`
does not believe them: it looks, at one instant, for the entry in which each sample of each open group lies.

Accounts in samples   issued · trained · dropped/<reason>
         in tokens    tokens/generated · tokens/trained · tokens/dropped/<reason>
         views        tokens/generated/worker/<name> · tokens/generated/version/<id> · tokens/trained/version/<id>
A view tells who or what the tokens of its account came from; the functions below move it together with its account. Views
by version name the newest versions, and all older ones as `older` (commit.lua); those by worker name the workers of whom the
bus still knows, and all others as `gone` (bus/leavers.py). So the accounts do not grow with the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from bus.messages.groups import OpenGroup
from bus.messages.reasons import DropReason
from bus.messages.versions import VersionSpan, spans_within
from bus.streams.hop import number_in, table_of, text_of
from bus.streams.link import Script
from bus.streams.redis import Bus
from bus.topology import GROUPS, PARKED, PREFIXES, PROMPTS, ROLLOUTS, SCORED, TAIL, Stream

AUDIT = Script("audit.lua")
HOME: tuple[Stream, ...] = (PROMPTS, PARKED, PREFIXES, TAIL, ROLLOUTS, SCORED, GROUPS)  # where a pending sample may lie
SHOWN = 20
OLDER = -1  # stands for all versions too old to be told apart, in the views by version
# Evaluation samples share parked and prefixes with the others but are in no account; their group ids begin so.
EVAL_GROUPS = "e"

By = Literal["reason", "version", "worker"]


class Accounts(msgspec.Struct, frozen=True, kw_only=True):
    """The accounts at one instant: samples, then tokens, then views."""

    issued: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_dropped: dict[str, int] = {}
    tokens_by_worker: dict[str, int] = {}
    tokens_by_version: dict[int, int] = {}
    tokens_trained_by_version: dict[int, int] = {}
    other: dict[str, int] = {}

    @property
    def pending(self) -> int:
        """Samples issued and neither trained nor dropped."""
        return self.issued - self.trained - sum(self.dropped.values())

    @property
    def tokens_pending(self) -> int:
        """Tokens generated and neither trained nor dropped."""
        return self.tokens_generated - self.tokens_trained - sum(self.tokens_dropped.values())

    def rows(self, by: By) -> list[tuple[str, dict[str, int]]]:
        """Lines of a table: a reason with its samples and tokens; a version or a worker with its tokens."""
        match by:
            case "reason":
                reasons = sorted({*self.dropped, *self.tokens_dropped})
                lines = [("trained", {"samples": self.trained, "tokens": self.tokens_trained})]
                lines += [
                    (f"dropped: {r}", {"samples": self.dropped.get(r, 0), "tokens": self.tokens_dropped.get(r, 0)}) for r in reasons
                ]
                return [*lines, ("pending", {"samples": self.pending, "tokens": self.tokens_pending})]
            case "version":
                trained = self.tokens_trained_by_version
                return [
                    (
                        "older" if v == OLDER else str(v),
                        {"generated": n, "trained": trained.get(v, 0), "dropped or pending": n - trained.get(v, 0)},
                    )
                    for v, n in sorted(self.tokens_by_version.items())
                ]
            case "worker":
                return [(worker, {"generated": n}) for worker, n in sorted(self.tokens_by_worker.items())]


class LedgerCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found at one instant.

    `located`: samples found per stream. `missing`: ids of open groups in no entry. `extra`: ids in an entry although
    their group is closed. `doubled`: ids in more than one entry. `residual`: samples that the accounts call pending,
    less those of the open groups. `token_residual`: tokens that the accounts call pending, less those on the streams.
    `reissuing`: the bus was lost and its open groups are being issued again, so that missing ones are expected.
    """

    accounts: Accounts
    open_groups: int
    located: dict[str, int]
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()
    residual: int = 0
    token_residual: int = 0
    reissuing: bool = False

    @property
    def closes(self) -> bool:
        """issued = trained + dropped + pending, sample by sample and token by token."""
        lost = self.missing and not self.reissuing
        return not (lost or self.extra or self.doubled or self.residual or self.token_residual)

    def text(self) -> str:
        """One line: the equation, and what is wrong with it."""
        a = self.accounts
        line = f"issued {a.issued} = trained {a.trained} + dropped {sum(a.dropped.values())} + pending {a.pending}"
        faults = [
            f"{len(ids)} {what}: {', '.join(ids[:SHOWN])}{', ...' if len(ids) > SHOWN else ''}"
            for what, ids in (
                ("in no stream", self.missing),
                ("of closed groups", self.extra),
                ("in two entries", self.doubled),
            )
            if ids
        ]
        if self.residual:
            faults.append(f"{self.residual:+d} samples against the open groups")
        if self.token_residual:
            faults.append(f"{self.token_residual:+d} tokens against the streams")
        if self.reissuing:
            faults.append("open groups are being issued again")
        return f"{line} · {'closes' if self.closes else 'DOES NOT CLOSE'}" + "".join(f" · {f}" for f in faults)


# -- movements: what a commit adds to its `ledger` --------------------------------------------------------------------


def issued(n_samples: int) -> dict[str, int]:
    """New samples are on the bus."""
    return {"issued": n_samples}


def generated(worker: str, spans: Iterable[VersionSpan]) -> dict[str, int]:
    """Tokens that this worker made and nobody counted before, with the versions that made them."""
    moves: dict[str, int] = {}
    for span in spans:
        _add(moves, f"tokens/generated/version/{span.version}", span.n)
    if moves:
        moves["tokens/generated"] = moves[f"tokens/generated/worker/{worker}"] = sum(moves.values())
    return moves


def trained(n_samples: int, spans: Iterable[VersionSpan]) -> dict[str, int]:
    """Samples inside a durable checkpoint, with the spans of all their response tokens."""
    moves = {"trained": n_samples}
    for span in spans:
        _add(moves, "tokens/trained", span.n)
        _add(moves, f"tokens/trained/version/{span.version}", span.n)
    return moves


def dropped(reason: DropReason | str, n_samples: int, tokens: int) -> dict[str, int]:
    """Samples that will not be trained; `reason` is a text of its own where the user's filter gave it. With `n_samples` 0: only
    tokens were thrown away, the sample goes on."""
    moves = {f"dropped/{reason}": n_samples, f"tokens/dropped/{reason}": tokens}
    return {account: n for account, n in moves.items() if n}


def spans_after(spans: Sequence[VersionSpan], skip: int) -> tuple[VersionSpan, ...]:
    """The spans of the tokens after the first `skip` ones."""
    return spans_within(spans, skip, sum(span.n for span in spans)) if skip else tuple(spans)


def _add(moves: dict[str, int], account: str, n: int) -> None:
    moves[account] = moves.get(account, 0) + n


# -- reading ----------------------------------------------------------------------------------------------------------


def accounts_of(ledger: Mapping[str, int]) -> Accounts:
    """The ledger hash as accounts. Names of another release go to `other`; the equation does not know them."""
    plain: dict[str, int] = {}
    tables: dict[str, dict[str, int]] = {}
    for name, n in ledger.items():
        head = next((table for table in _TABLES if name.startswith(f"{table}/")), "")
        if head:
            tables.setdefault(head, {})[name[len(head) + 1 :]] = n
        else:
            plain[name] = n
    return Accounts(
        issued=plain.pop("issued", 0),
        trained=plain.pop("trained", 0),
        dropped=tables.get("dropped", {}),
        tokens_generated=plain.pop("tokens/generated", 0),
        tokens_trained=plain.pop("tokens/trained", 0),
        tokens_dropped=tables.get("tokens/dropped", {}),
        tokens_by_worker=tables.get("tokens/generated/worker", {}),
        tokens_by_version=_by_int(tables.get("tokens/generated/version", {})),
        tokens_trained_by_version=_by_int(tables.get("tokens/trained/version", {})),
        other=plain,
    )


_TABLES = (
    "dropped",
    "tokens/dropped",
    "tokens/generated/worker",
    "tokens/generated/version",
    "tokens/trained/version",
)


def _by_int(table: Mapping[str, int]) -> dict[int, int]:
    return {OLDER if name == "older" else int(name): n for name, n in table.items()}


async def read_accounts(bus: Bus) -> Accounts:
    """The accounts as they are now."""
    return accounts_of(await bus.numbers(bus.keys.ledger))


async def check(bus: Bus) -> LedgerCheck:
    """Find every pending sample and compare with the accounts.

    One script reads accounts, open groups and the readable fields of all entries at one instant: nothing can move
    between two looks, so what is reported missing is missing. It holds the server for some 15 ms per 1,000 entries of
    7 kB (measured), less for small ones: for operators and tests, not for a loop.
    """
    streams = [bus.keys.stream(stream.name) for stream in HOME]
    keys = [bus.keys.state, bus.keys.ledger, bus.keys.open_groups, *streams]
    reissue, ledger, opened, *rows = await bus.link.run_script(AUDIT, keys, [])
    accounts = accounts_of(bus.counts_of(bus.keys.ledger, table_of(ledger)))
    groups = {name: bus.group_of(name, raw) for name, raw in table_of(opened).items()}
    return audit(
        accounts,
        groups,
        {stream.name: _entries(raw) for stream, raw in zip(HOME, rows, strict=True)},
        reissuing=bool(reissue) and text_of(reissue).startswith("pending"),
    )


class Found(msgspec.Struct, frozen=True):
    """Readable fields of one entry."""

    entry_id: str
    id: str
    group: str
    tokens: int = 0
    samples: int = 1  # that it stands for; more than one in `groups` only


def audit(
    accounts: Accounts,
    groups: Mapping[str, OpenGroup],
    entries: Mapping[str, Sequence[Found]],
    *,
    reissuing: bool = False,
) -> LedgerCheck:
    """Where each sample lies (pure): `groups` are the open ones and their parts by key, `entries` what lies on each stream
    of HOME."""
    wanted = {sample for opened in groups.values() for sample in opened.sample_ids}
    places: dict[str, int] = {}  # sample -> entries it lies in
    located: dict[str, int] = {}
    extra: list[str] = []
    tokens = 0
    for name, found in entries.items():
        located[name] = 0
        for entry in found:
            if not entry.id or entry.group.startswith(EVAL_GROUPS):
                continue
            tokens += entry.tokens
            if name == GROUPS.name:
                part = groups.get(entry.id)
                samples = part.sample_ids[: entry.samples] if part is not None else ()
            else:
                samples = (entry.id,) if entry.id in wanted else ()
            located[name] += len(samples) or entry.samples
            extra += [] if samples else [entry.id]
            for sample in samples:
                places[sample] = places.get(sample, 0) + 1
    return LedgerCheck(
        accounts=accounts,
        open_groups=len({opened.group_id for opened in groups.values()}),
        located=located,
        missing=tuple(sorted(wanted - places.keys())),
        extra=tuple(sorted(extra)),
        doubled=tuple(sorted(sample for sample, n in places.items() if n > 1)),
        residual=accounts.pending - len(wanted),
        token_residual=accounts.tokens_pending - tokens,
        reissuing=reissuing,
    )


def _entries(flat: Sequence[bytes]) -> list[Found]:
    found: list[Found] = []
    for at in range(0, len(flat), 5):
        entry_id, sample, group, tokens, note = (text_of(part) for part in flat[at : at + 5])
        samples = note.removeprefix("samples=") if note.startswith("samples=") else "1"
        found.append(
            Found(
                entry_id,
                sample,
                group,
                number_in(tokens, 0),
                number_in(samples, 1),
            )
        )
    return found
