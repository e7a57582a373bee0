"""The ways to run a model on the torch backend, and which one a directory gets.

own            a family with code of ours: the fast way
transformers   any causal class of the installed transformers, after a proof
"""
