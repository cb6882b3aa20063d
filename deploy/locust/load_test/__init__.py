"""Load tests of streaming completions. Only ``run``, ``shapes`` and the locustfile import locust.

Times are seconds of ``time.perf_counter`` unless a name says otherwise.
"""
