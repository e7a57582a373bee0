"""Ways of a policy version from the trainer to engines: a record each, with what a worker does; what the trainer does is named
there. `records.py` lists them."""
