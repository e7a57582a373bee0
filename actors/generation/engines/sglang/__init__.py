"""SGLang: its servers, started here or running elsewhere, its HTTP interface, and our functions inside it.

From the outside in: `record` (what everybody else asks), `host` (what this host has of it), `opening` (a worker's engine),
`server` (a server as a child, with `boot_*`), `client` (its interface, over `calls`, `http_stream` and `wire`), `routed` (behind a
router), `attach` (what a server is), `inside` and what it calls (in the server's own process).
"""
