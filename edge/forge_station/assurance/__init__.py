"""Quality engineering: does the station agree with people and with itself, and does it stay so?

`agreement`, `gauge_study`: measurement system analysis (`msa_command`, `forge-station msa`).
`audit`, `escape_alarm`, `looks`: what labels prove of escapes and overkill (`forge-station audit`).
`charts`, `drift`: control charts on the running station (`forge-station drift`).

numpy and the standard library; pictures are SVG text (`svg`). docs/QUALITY.md is for people.
"""
