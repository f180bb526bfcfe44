"""The link to the MES: durable outbox, MQTT publisher, payloads, demo broker, listener.

It knows nothing of scanning or of the model: it takes a finished verdict as plain data.

`topics` where messages go · `payloads` what is in them · `schema` their check · `outbox` what is
not delivered yet · `link` one MQTT connection (paho) · `publisher` outbox to link · `broker` the
embedded demo broker · `listen` what an MES would receive.
"""
