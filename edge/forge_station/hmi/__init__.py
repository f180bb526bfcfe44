"""The operator's page: a process of its own that shows what the station wrote down.

It reads files beside the outbox (`board`), pictures of the evidence and, signed, sends commands. It
never opens the outbox, takes no lock that the station waits for, and the station does not know it.

`settings` section `hmi` of the station file · `feed` what the station says · `live` the live screen
`users`, `sessions`, `audit` who may do what, and who did · `context` what a route is given
`app` all routes with their roles · `command` `forge-station hmi` · `static` the page itself
"""
