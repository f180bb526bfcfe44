"""The failure matrix: one bounded run a fault, against a real mosquitto, counted at a consumer.

    make faults                                  every row, a table, one JSON object
    PYTHONPATH=edge:. python -m tests.mes.faults --rows 1,3 --short

Rows live in the modules `rows_*.py` of this package, each in a list `ROWS`; a new module is found
by its name. `tests/mes/test_faults.py` runs the short form of each.
"""
