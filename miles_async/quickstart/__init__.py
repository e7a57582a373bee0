"""Tasks to try the product on: problems (`arithmetic`, `columns`), a tokenizer, and a tiny warm-started Qwen3 (`model`).

Importing this package stays cheap: only `model`, `tokenizer` and `warm_start` import more than the standard library.
"""
