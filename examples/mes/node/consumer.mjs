// A consumer of a forge-station's results for Node.js 20 or later.
//
// It knows the station by its AsyncAPI document alone (`forge-station interface --asyncapi FILE`):
// topics, QoS and schemas are read from there. It takes each result once, says what is missing,
// validates every message, and draws the defect grids: in the terminal, or as SVG files.
//
//   npm install
//   node consumer.mjs interface.json                        broker and topics as the document says
//   node consumer.mjs interface.json --out pictures         one SVG a result with defects
//   node consumer.mjs interface.json --url mqtts://broker:8883 --ca ca.crt --cert me.crt --key me.key
//
// Every result is one line of JSON on stdout; pictures and complaints go to stderr.

import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { Ajv2020 } from 'ajv/dist/2020.js';
import mqtt from 'mqtt';

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    url: { type: 'string' },
    id: { type: 'string', default: 'node-consumer' },
    count: { type: 'string' },
    out: { type: 'string' },
    ca: { type: 'string' },
    cert: { type: 'string' },
    key: { type: 'string' },
  },
});
if (positionals.length !== 1) {
  console.error('usage: node consumer.mjs INTERFACE.json [--url URL] [--count N] [--out FOLDER]');
  process.exit(64);
}

// What the document says ----------------------------------------------------------------------

let document;
try {
  document = JSON.parse(readFileSync(positionals[0], 'utf8'));
} catch (error) {
  console.error(`no AsyncAPI document: ${error.message}`);
  console.error('write it with: forge-station interface --station FILE --asyncapi INTERFACE.json');
  process.exit(64);
}
const follow = (reference) =>
  reference
    .slice(2)
    .split('/')
    .reduce((part, key) => part[key.replaceAll('~1', '/').replaceAll('~0', '~')], document);

const ajv = new Ajv2020({ strict: false, allErrors: true });
ajv.addSchema(document, 'document');

/** Address, QoS and validator of a kind of message that the station sends. */
function channel(name) {
  const operation = Object.values(document.operations).find(
    (item) => item.action === 'send' && item.channel.$ref === `#/channels/${name}`,
  );
  const message = follow(document.channels[name].messages[name].$ref);
  return {
    name,
    address: document.channels[name].address,
    qos: operation.bindings.mqtt.qos,
    check: ajv.compile({ $ref: `document${message.payload.$ref}` }),
  };
}

const channels = ['verdict', 'grid', 'alarm', 'conn'].map(channel);
const server = Object.values(document.servers)[0];
const url =
  options.url ?? `${server.protocol === 'secure-mqtt' ? 'mqtts' : 'mqtt'}://${server.host}`;

// Once, and nothing missing -------------------------------------------------------------------

const seen = new Set(); // a real consumer keeps this, and `last`, where it keeps the results
const last = new Map();

/** False for a message that came before. Complains of holes in the stream's numbers. */
function isNew(message) {
  if (seen.has(message.id)) return false;
  seen.add(message.id);
  const key = `${message.source} ${message.stream} ${message.epoch}`;
  const before = last.get(key);
  if (before !== undefined && message.streamSeq > before + 1) {
    console.error(`GAP ${message.stream} ${before + 1} to ${message.streamSeq - 1} did not come`);
  }
  last.set(key, Math.max(before ?? 0, message.streamSeq));
  return true;
}

// The grid ------------------------------------------------------------------------------------

/** 16 rows of 16 booleans of one view: from its bytes, its numbers, or its list of cells. */
function cellsOf(view) {
  const rows = Array.from({ length: 16 }, () => Array(16).fill(false));
  if (view.data !== undefined) {
    Buffer.from(view.data, 'base64').forEach((byte, at) => {
      rows[at >> 4][at & 15] = byte >= 128;
    });
  } else if (view.values !== undefined) {
    view.values.forEach((row, r) => row.forEach((value, c) => (rows[r][c] = value >= 128)));
  } else {
    for (const [row, column] of view.cells ?? []) rows[row - 1][column - 1] = true;
  }
  return rows;
}

/** The views side by side, a character a cell. */
function drawn(views) {
  const blocks = views.map((view) => [
    `${view.mark} ${view.view}`.padEnd(16),
    ...cellsOf(view).map((row) => row.map((bad) => (bad ? '#' : '.')).join('')),
  ]);
  return blocks[0].map((_, line) => blocks.map((block) => block[line]).join('   ')).join('\n');
}

/** The same as an SVG file, with the size of a cell in mm where the message says it. */
function svg(grid) {
  const size = 14;
  const parts = grid.views.map((view, number) => {
    const left = 10 + number * (16 * size + 20);
    const cells = cellsOf(view).flatMap((row, r) =>
      row.map(
        (bad, c) =>
          `<rect x="${left + c * size}" y="${24 + r * size}" width="${size}" height="${size}"` +
          ` fill="${bad ? '#dc322f' : '#fff'}" stroke="#ccc"/>`,
      ),
    );
    const mm = view.mmPerCell ?? grid.mmPerCell;
    const label = `${view.mark} ${view.view}${mm ? `, ${mm} mm a cell` : ''}`;
    return `<text x="${left}" y="16" font-family="sans-serif" font-size="12">${label}</text>${cells.join('')}`;
  });
  const width = 10 + grid.views.length * (16 * size + 20);
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${34 + 16 * size}">${parts.join('')}</svg>\n`;
}

// The messages --------------------------------------------------------------------------------

// A verdict whose cells did not fit names a grid message, which may come before it or after it.
const grids = new Map(); // id -> grid message whose verdict has not come
const waiting = new Map(); // id of a grid message that has not come -> resultId
let results = 0;

function show(grid, resultId) {
  if (!grid.views.some((view) => cellsOf(view).flat().includes(true))) return;
  console.error(drawn(grid.views));
  if (options.out) {
    mkdirSync(options.out, { recursive: true });
    writeFileSync(join(options.out, `${resultId}.svg`), svg(grid));
  }
}

function takeVerdict(message) {
  const count = (view) => view.count ?? view.cells.length;
  console.log(
    JSON.stringify({
      partId: message.partId,
      good: message.verdict === 'PASS', // only this word is good
      verdict: message.verdict,
      reasons: message.reasons.map((reason) => reason.code),
      cells: message.grid ? message.grid.views.reduce((sum, view) => sum + count(view), 0) : null,
      seq: message.seq,
    }),
  );
  results += 1;
  if (message.grid?.inline !== 'summary') {
    if (message.grid) show(message.grid, message.resultId);
  } else if (grids.has(message.grid.ref)) {
    show(grids.get(message.grid.ref), message.resultId);
    grids.delete(message.grid.ref);
  } else {
    waiting.set(message.grid.ref, message.resultId);
  }
}

function take(kind, message) {
  if (kind === 'conn') {
    console.error(`station ${message.source} is ${message.state}`);
    return;
  }
  if (!isNew(message)) return;
  if (kind === 'alarm') {
    console.error(`ALARM ${message.code} ${message.active ? '' : '(over) '}${message.text}`);
  } else if (kind === 'verdict') {
    takeVerdict(message);
  } else if (waiting.has(message.id)) {
    show(message, waiting.get(message.id));
    waiting.delete(message.id);
  } else {
    grids.set(message.id, message);
  }
}

const file = (name) => (name ? readFileSync(name) : undefined);
const client = mqtt.connect(url, {
  protocolVersion: 5,
  clientId: options.id,
  clean: false, // the broker keeps what comes while this is away
  properties: { sessionExpiryInterval: 7 * 86400 },
  ca: file(options.ca),
  cert: file(options.cert),
  key: file(options.key),
});

client.on('connect', () => {
  for (const { address, qos } of channels) {
    client.subscribe(address, { qos }, (error, granted) => {
      if (error || granted.some((item) => item.qos >= 128)) {
        console.error(`not allowed to subscribe to ${address}`);
        process.exit(1);
      }
    });
  }
});
client.on('error', (error) => console.error(`broker ${url}: ${error.message}`));
client.on('message', (topic, body) => {
  const found = channels.find((item) => item.address === topic);
  let message;
  try {
    message = JSON.parse(body.toString('utf8'));
  } catch (error) {
    console.error(`UNREADABLE ${topic}: ${error.message}`);
    return;
  }
  if (!found.check(message)) {
    console.error(`INVALID ${topic}: ${ajv.errorsText(found.check.errors)}`);
    return;
  }
  take(found.name, message);
  const enough = options.count && results >= Number(options.count) && waiting.size === 0;
  if (enough) client.end(false, () => process.exit(0));
});
