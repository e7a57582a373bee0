"""What the governor may be given: envelopes that are possible and hold the present value, at the start and in a patch."""

from __future__ import annotations

from typing import Any

import pytest

from miles_async.settings.errors import SettingsError
from miles_async.settings.live import check_patch
from miles_async.settings.load import settings_from
from tests.miles_async.test_settings_live import BASE, values_of

ASYNC = {"use_tis": True, "max_weight_staleness": 2, "rollout_batch_size": 16}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"governor": True}, "no setting has an envelope"),
        ({"governor_staleness": "6"}, "governor_staleness = '6': not an envelope. Write LOW:HIGH"),
        ({"governor_staleness": "-1:6"}, "not an envelope"),
        ({"governor_staleness": "6:1"}, "its low end is above its high end"),
        ({"governor_staleness": "1:2000"}, "max_weight_staleness goes from 0 to 1024"),
        ({"governor": True, "governor_staleness": "3:6"}, "max_weight_staleness = 2 lies outside"),
        (
            {"governor": True, "governor_oversampling": "16:64"},
            "over_sampling_batch_size = 0 (what the bound admits) lies",
        ),
        (
            {"governor": True, "governor_oversampling": "8:64", "over_sampling_batch_size": 32},
            "its end 8 is refused: over_sampling_batch_size = 8: smaller than rollout_batch_size = 16",
        ),
        (
            {"governor": True, "governor_concurrency": "8:64", "sglang_server_concurrency": "auto"},
            "= 0 (auto) lies outside",
        ),
        ({"governor": True, "governor_staleness": "0:4", "staleness_policy": "split"}, "its end 0 is refused"),
    ],
)
def test_an_envelope_that_cannot_be_kept_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        settings_from(**BASE, **(ASYNC | fields))
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_envelopes_are_knobs_and_bind_who_tunes_by_hand() -> None:
    values = values_of(**ASYNC, governor=True, governor_staleness="1:4")
    assert check_patch(values, {"governor_staleness": "1:6"}) == {"governor_staleness": "1:6"}
    assert check_patch(values, {"max_weight_staleness": 4}) == {"max_weight_staleness": 4}
    with pytest.raises(SettingsError, match="max_weight_staleness = 5 lies outside"):
        check_patch(values, {"max_weight_staleness": 5})
    assert check_patch(values, {"max_weight_staleness": 5, "governor": "false"})["max_weight_staleness"] == 5
