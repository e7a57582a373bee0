"""Flags of sglang-router: our defaults (pure)."""

from actors.runtime.child import ArgValue

MODULE = "sglang_router.launch_router"
KEY = "MILES_ASYNC_ROUTER_KEY"
# Siblings of a group share their prompt, so they go to one engine; new groups go to the engine with the fewest requests.
DEFAULTS: dict[str, ArgValue] = {
    "policy": "manual",
    "assignment-mode": "min_load",
    "request-timeout-secs": 14400,
    "health-check-interval-secs": 5,
    "log-level": "warn",
}
