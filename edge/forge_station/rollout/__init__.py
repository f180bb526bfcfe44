"""A bundle to many stations, group by group, from an engineer's shell and without a server.

`plan.py` says what is wanted, `record.py` what was done (on disk before it is done), `ways.py` how
a station is reached, `runner.py` decides, `serve.py` and `stick.py` carry the file.
"""
