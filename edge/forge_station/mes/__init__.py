"""The link to the MES: what the station says, that it arrives, and what it takes.

It knows nothing of scanning or of the model: it takes a finished verdict as plain data.

What is said: `topics` where messages go · `payloads` what is in them, `stamp` and `flat` parts of
it · `schema` their check · `interface` the same as documents · `picture` a message as a picture.
That it arrives: `outbox` what is not delivered yet · `link` one MQTT connection (paho) ·
`publisher` outbox to link · `report` a verdict into the outbox · `receipts` what consumers have.
What is taken: `command` one signed command · `commands` the service · `credentials`, `acl` who may.
How it is: `alarms`, `health`, `metrics`, `endpoint`. In other tongues: `sparkplug`, `opcua`.
At the other end: `consumer` one of record · `listen` for people · `command_client` · `broker` the
embedded demo broker.
"""
