"""The interface as one HTML page for the people who connect an MES to a station.

Made from the same topic table, schemas and examples as the AsyncAPI document. No script, no font,
no request: it opens from a USB stick.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from forge_station.mes import picture, schema
from forge_station.mes.alarms import CODES
from forge_station.mes.command import MAX_BYTES, MAX_LIFETIME_S, ROLES
from forge_station.mes.interface import RESERVED, VERSION, command_schemas, example
from forge_station.mes.topics import TOPICS, MqttConfig, Topic, filled, topic_of

_GROUPS = (
    ("evt", "Events", "from a durable outbox, at least once, never retained"),
    ("sts", "Status", "retained, the latest value only"),
    ("rsp", "Answers", "to commands"),
    ("job", "Jobs", "progress of model releases"),
    ("in", "What the station takes", "nothing in it is trusted for having come this way"),
)

_STYLE = """
:root { --ink:#1f2933; --soft:#5f6c7b; --line:#d9dfe5; --paper:#fff; --shade:#f5f7f9;
  --accent:#0b6e99; --bad:#b3261e }
@media (prefers-color-scheme: dark) { :root { --ink:#e3e8ee; --soft:#9aa7b4; --line:#37424d;
  --paper:#161b20; --shade:#1f262d; --accent:#6cc0e5; --bad:#ff8a80 } }
* { box-sizing:border-box }
body { margin:0; font:15px/1.5 system-ui, sans-serif; color:var(--ink); background:var(--paper) }
main { max-width:1060px; margin:0 auto; padding:24px 20px 80px }
h1 { font-size:26px; margin:0 0 4px } h2 { font-size:20px; margin:44px 0 10px;
  border-bottom:1px solid var(--line); padding-bottom:4px } h3 { font-size:16px; margin:30px 0 6px }
p, ul, ol { margin:6px 0 10px } li { margin:3px 0 } .soft { color:var(--soft) }
a { color:var(--accent) } nav { columns:3; margin:14px 0; font-size:14px } nav a { display:block }
code, pre { font:13px/1.45 ui-monospace, monospace }
code { background:var(--shade); padding:1px 4px; border-radius:3px; overflow-wrap:anywhere }
pre { background:var(--shade); padding:10px 12px; border-radius:6px; overflow:auto; margin:8px 0 }
pre code { padding:0; background:none }
.wide { overflow-x:auto }
table { border-collapse:collapse; width:100%; margin:8px 0; font-size:14px }
th, td { text-align:left; vertical-align:top; padding:5px 10px 5px 0;
  border-bottom:1px solid var(--line) }
th { color:var(--soft); font-weight:600 } td:first-child { white-space:nowrap }
.must::after { content:" *"; color:var(--bad) } details { margin:8px 0 } summary { cursor:pointer }
svg { max-width:100%; height:auto; border:1px solid var(--line); border-radius:6px }
.tag { border:1px solid var(--line); border-radius:10px; padding:0 7px; font-size:12px;
  color:var(--soft); white-space:nowrap }
@media (max-width:700px) { nav { columns:1 } }
@media print { details { display:block } nav { display:none } }
"""


def page(config: MqttConfig) -> str:
    """The page of one station, complete."""
    sections = [
        ("connect", "Connect", _connect(config)),
        ("topics", "Topics", _topics(config)),
        ("delivery", "Delivery: what you can rely on", _delivery()),
        ("grid", "The defect grid", _grid()),
        ("messages", "Messages", "".join(map(_message, TOPICS.values()))),
        ("commands", "Commands", _commands(config)),
        ("alarms", "Alarms", _alarms()),
        ("versions", "Versions", _versions()),
    ]
    contents = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2>{text}</section>' for name, title, text in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Station {escape(config.station)}: interface</title>"
        f"<style>{_STYLE}</style></head><body><main>"
        f"<h1>Station {escape(config.station)}: interface for the MES</h1>"
        f'<p class="soft">Interface {VERSION}. MQTT 5, JSON. Topic root '
        f"<code>{escape(config.root)}</code></p><nav>{contents}</nav>{body}</main></body></html>\n"
    )


def _connect(config: MqttConfig) -> str:
    tls = " --cafile ca.crt --cert you.crt --key you.key" if config.tls else ""
    where = f"mosquitto_sub -h {config.host} -p {config.port}{tls} -V 5"
    look = f"{where} -t '{topic_of(config, 'conn')}' -C 1"
    events = f"{config.root}/insp/v1/evt/#"
    take = f"{where} -i your-mes -c -q 1 -x 604800 -t '{events}'"
    security = {
        "tls": "TLS 1.2 or later with client certificates: your name at the broker is the CN.",
        "loopback": "This station file talks to a broker on the station's own machine, in the "
        "clear. Across a network it must be TLS.",
        "insecure": "<b>Not encrypted</b>: this station file says <code>insecure: true</code>.",
    }[config.security]
    return f"""
<p>Broker <code>{escape(config.host)}:{config.port}</code>. {security}</p>
<ol>
<li>See that the station is there: <pre><code>{escape(look)}</code></pre>
<code>state</code> is ONLINE, OFFLINE (it said good-bye) or CONNECTIONBROKEN (the broker lost it).
</li>
<li>Take the events, as a session that the broker keeps while you are away:
<pre><code>{escape(take)}</code></pre>
All events, also those you have no use for: what nobody subscribes to waits at the station, and it
raises the alarm NO_CONSUMER.</li>
<li>Treat only <code>"verdict": "PASS"</code> as good. No message is no PASS.</li>
<li>Store <code>id</code>, and drop what you have. Watch <code>streamSeq</code> for holes.</li>
<li>Ask again for what is missing: the command <a href="#commands"><code>replay</code></a>, or
<a href="#m-receipt">receipts</a>, with which the station sends it again by itself.</li>
</ol>"""


def _topics(config: MqttConfig) -> str:
    rows = []
    for first, title, text in _GROUPS:
        rows.append(f'<tr><th colspan="4">{title}: <span class="soft">{text}</span></th></tr>')
        for topic in TOPICS.values():
            if topic.path.split("/")[0] == first:
                rows.append(
                    f'<tr><td><a href="#m-{topic.name}">{topic.name}</a></td>'
                    f"<td><code>{escape(topic_of(config, topic.name))}</code></td>"
                    f"<td>{_how(topic)}</td><td>{escape(topic.summary)}</td></tr>"
                )
    for item in config.flat:
        names = ", ".join(f"{escape(n)} = {escape(p)}" for n, p in item.fields.items())
        level = "/&lt;name&gt;" if item.format == "values" else ""
        rows.append(
            f"<tr><td>flat</td><td><code>{escape(filled(item.topic, config))}{level}</code></td>"
            f"<td>{_tags('QoS 0', 'retained')}</td><td>{names}</td></tr>"
        )
    return (
        '<div class="wide"><table><tr><th>kind</th><th>topic</th><th>how</th><th>what</th></tr>'
        f"{''.join(rows)}</table></div>"
        "<p>Every event: <code>evt/#</code>. Every status: <code>sts/#</code>. An MES without "
        "wildcards or nesting takes a flat topic with names of its own choice "
        "(<code>mqtt.flat</code> in the station file).</p>"
    )


def _how(topic: Topic) -> str:
    tags = [f"QoS {topic.qos}", "retained" if topic.retain else ""]
    tags.append(f"expires after {topic.expiry_s} s" if topic.expiry_s else "")
    tags.append("reserved" if topic.reserved else "")
    return _tags(*filter(None, tags))


def _tags(*texts: str) -> str:
    return " ".join(f'<span class="tag">{item}</span>' for item in texts)


def _delivery() -> str:
    return """
<ul>
<li><b>Nothing is lost at the station.</b> A verdict is on its disk before it counts as decided, and
stays there until the broker confirms it; broker or network may be away for days.</li>
<li><b>At least once.</b> A repeat has the same <code>id</code> and the same bytes. Drop it by
<code>id</code>, or by <code>source</code>, <code>epoch</code> and <code>seq</code>.</li>
<li><b>In order within a stream</b> (<code>verdict</code>, <code>grid</code>, <code>alarm</code>,
<code>audit</code>), not between streams. <code>streamSeq</code> counts without holes.</li>
<li><b>A broker's confirmation is not yours.</b> A broker that is killed may lose what it confirmed.
You see it as a hole in <code>streamSeq</code>. Either ask for it (<code>replay</code>), or write
<a href="#m-receipt">receipts</a>: then the station keeps every event until you have stored it.</li>
<li><b>A new <code>epoch</code></b> means that the station's outbox was begun anew: numbers start again
at 1. Do not compare them with older ones.</li>
<li><b>Time</b> is UTC with milliseconds. <code>timeQuality</code> says whether to trust it. Order by
<code>seq</code>, never by time. A result that is sent late keeps the time of its decision.</li>
<li><b>A message that would break its schema is not sent.</b> The station keeps it as a dead letter
and raises the alarm DEAD_LETTER.</li>
</ul>"""


def _grid() -> str:
    return f"""
<p>Each part is seen in views (front, side, top). Each view is divided into 16 rows and 16 columns;
row 1 is at the top, column 1 at the left. <code>cells</code> lists the defective cells as
<code>[row, column]</code>. This picture is drawn from the example of the
<a href="#m-verdict">verdict</a> message:</p>
{picture.svg(example("verdict"))}
<ul>
<li><code>data</code>: 256 bytes, row by row, base64; a cell is defective from 128 on. Or
<code>values</code>: 16 rows of 16 numbers, where the station file asks for it.</li>
<li><code>originMm</code> is the top-left corner of the grid in the view's own coordinates (right, up),
<code>mmPerCell</code> the size of a cell. Cell [r, c] begins at
<code>originMm[0] + (c-1) * mmPerCell</code> to the right and ends
<code>originMm[1] - (r-1) * mmPerCell</code> up.</li>
<li>A verdict stays within 1,600 bytes. What does not fit is left out in this order:
<code>data</code> (<code>inline: cells</code>), then the cells themselves (<code>inline: summary</code>).
Then the <a href="#m-grid">grid</a> message whose id is <code>ref</code> has them; it may come before the
verdict or after it.</li>
</ul>"""


def _message(topic: Topic) -> str:
    content = schema.load(f"{topic.schema.replace('/', '-')}.json")
    rows = "".join(_rows(content, content, ""))
    shown = json.dumps(example(topic.name), indent=2, ensure_ascii=False)
    size = len(json.dumps(example(topic.name), separators=(",", ":"), ensure_ascii=False).encode())
    note = "<p>Its form is fixed; this release does not send it.</p>" if topic.reserved else ""
    opened = " open" if topic.name == "verdict" else ""
    return f"""
<h3 id="m-{topic.name}">{topic.name} <span class="tag">{topic.schema}</span> {_how(topic)}</h3>
<p>{_text(content["title"])}. {_text(content.get("description", ""))}</p>{note}
<details{opened}><summary>Fields (<span class="must">always there</span>)</summary><div class="wide"><table>
<tr><th>field</th><th>type</th><th>meaning</th><th>OPC 40100-1</th></tr>{rows}</table></div></details>
<details><summary>Example, {size:,} bytes</summary><pre><code>{escape(shown)}</code></pre></details>"""


def _rows(part: Mapping[str, Any], document: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Table rows of an object's fields, those of parts after their own."""
    required = set(part.get("required", ()))
    for other in part.get("allOf", ()):
        file = schema.load(other["$ref"])
        yield from _rows(file, file, prefix)
    for name, rules in part.get("properties", {}).items():
        if name == "schema" and "allOf" in part:
            continue  # the envelope has said it
        found, inner = _resolved(rules, document)
        must = ' class="must"' if name in required else ""
        opc = found.get("x-opc", "")
        text = _text(str(found.get("description", "")))
        yield (
            f"<tr><td{must}><code>{escape(prefix + name)}</code></td><td>{_type(found)}</td>"
            f"<td>{text}</td><td>{opc}</td></tr>"
        )
        if "properties" in inner:
            mark = "[]." if inner is not found else "."
            yield from _rows(inner, document, f"{prefix}{name}{mark}")


def _text(words: str) -> str:
    """A schema's own words; what it has in backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words, quote=False))


def _resolved(
    rules: Mapping[str, Any], document: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A field's own rules, and those of what is inside it (of each item of a list)."""

    def follow(part: Mapping[str, Any]) -> Mapping[str, Any]:
        reference = part.get("$ref", "")
        if reference.startswith("#/$defs/"):
            found: Mapping[str, Any] = document["$defs"][reference.rsplit("/", 1)[-1]]
            return found
        return part

    own = follow(rules)
    return own, follow(own["items"]) if own.get("type") == "array" else own


def _type(rules: Mapping[str, Any]) -> str:
    if "const" in rules:
        return f"<code>{escape(json.dumps(rules['const']))}</code>"
    if "enum" in rules:
        return " ".join(f"<code>{escape(str(item))}</code>" for item in rules["enum"])
    kind = str(rules.get("type", "any"))
    low, high = rules.get("minimum"), rules.get("maximum")
    limits = f" {low} to {high}" if None not in (low, high) else f" from {low}" * (low is not None)
    if "maxLength" in rules:
        limits = f" up to {rules['maxLength']}"
    return escape({"integer": "whole number", "string": "text"}.get(kind, kind) + limits)


def _commands(config: MqttConfig) -> str:
    rows = []
    for name, rules in command_schemas():
        arguments = "<br>".join(
            f"<code{' class=must' if key in rules.get('required', ()) else ''}>{escape(key)}</code> "
            f"{_text(part.get('description', ''))}"
            for key, part in rules["properties"].items()
        )
        tag = f" {_tags('reserved')}" if name in RESERVED else ""
        roles = ", ".join(sorted(ROLES[name]))
        rows.append(
            f"<tr><td><code>{name}</code>{tag}</td><td>{escape(rules['title'])}</td>"
            f"<td>{arguments}</td><td>{roles}</td></tr>"
        )
    command = escape(topic_of(config, "command"))
    return f"""
<p>Publish to <code>{command}</code>, not retained. The station carries out what is rightly signed by a
key that it knows, meant for it, not expired, and new; everything else is refused and told in an
<a href="#m-audit">audit</a> message. The answer comes on <code>{escape(topic_of(config, "reply"))}</code>,
or on another topic below <code>rsp/</code> that you name as the MQTT 5 response topic.</p>
<ol>
<li>Make a key: <code>openssl genpkey -algorithm ed25519 -out mes.pem</code>. Its public half goes into
the station file (<code>commands.keys</code>) with a role.</li>
<li>Fill in the <a href="#m-command">command</a> message without <code>sig</code>. <code>target.epoch</code>
stands in the retained conn message. <code>counter</code> grows with every command of the key:
microseconds since 1970 will do. At most {MAX_LIFETIME_S:g} seconds from <code>issuedAt</code> to
<code>expiresAt</code>, at most {MAX_BYTES:,} bytes.</li>
<li>Sign the RFC 8785 canonical form of it (Ed25519) and add <code>sig</code>. Libraries: <code>rfc8785</code>
(Python), <code>canonicalize</code> (npm), <code>json-canonicalization</code> (Java, Go, C#).</li>
<li>The same <code>cmdId</code> again is not carried out twice: the answer is DUPLICATE and says how
it went.</li>
</ol>
<p>From a shell: <code>forge-station command ping --key mes.pem --station station.yaml</code></p>
<div class="wide"><table><tr><th>command</th><th>what it does</th><th>arguments</th><th>role</th></tr>
{"".join(rows)}</table></div>
<p>Which of them a station takes, its <a href="#m-birth">birth</a> message says
(<code>capabilities</code>).</p>"""


def _alarms() -> str:
    rows = "".join(
        f"<tr><td><code>{code}</code></td><td>{item.severity}</td><td>{escape(item.meaning)}</td>"
        f"<td>{'event' if item.event else 'until it is over'}</td></tr>"
        for code, item in CODES.items()
    )
    return (
        "<p>Codes of the <a href='#m-alarm'>alarm</a> message. Codes may be added, never renamed.</p>"
        '<div class="wide"><table><tr><th>code</th><th>severity</th><th>meaning</th><th>active</th>'
        f"</tr>{rows}</table></div>"
    )


def _versions() -> str:
    listed = ", ".join(f"<code>{topic.schema}</code>" for topic in TOPICS.values())
    return f"""
<p>{listed}. A higher minor version only adds optional fields: ignore what you do not know. A major
version gets a topic level of its own (<code>insp/v2</code>), and both are published side by side for a
time.</p>
<p>The same for machines: <code>forge-station interface --asyncapi FILE</code> (AsyncAPI 3.1) and
<code>--schemas FOLDER</code> (JSON Schema 2020-12).</p>"""
