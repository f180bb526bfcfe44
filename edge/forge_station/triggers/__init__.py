"""What tells the station that a part is there: camera line, PLC, command, message, clock.

It knows no scanner, no model and no broker: a source makes a `Trigger` and offers it to the gate.

`settings` of the station file · `gate` one part at a time, the rest is refused · `sources` the
simple ones · `local` a command over a Unix socket, lines of stdin · `registers` the PLC's register
map · `handshake` its state machine · `plc` the Modbus TCP server around it.
"""
