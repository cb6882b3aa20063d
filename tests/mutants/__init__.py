"""Hand-written faults in the production code, and a runner that shows that our own tests catch every one.

``python -m tests.mutants`` runs all of them, ``--short`` the form for CI. Not part of the test suite, apart from
test_catalogue.py, which holds that every edit still fits the source.
"""
