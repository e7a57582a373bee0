"""Inference engines, one folder a kind: its record (`record.py`), and the adapters that it opens. `records.py` lists them."""
