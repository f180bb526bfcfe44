// Sends a signed command to a forge-station and prints its answer. Node.js 20 or later.
//
//   npm install
//   node command.mjs acme/berlin/hall2/l3/station-1 ping --key mes.pem --url mqtt://broker
//   node command.mjs ... setThreshold --args '{"name": "defect_fail", "value": 0.45}' --key me.pem
//
// What is signed is the RFC 8785 canonical form: members sorted, no spaces, numbers as JavaScript
// writes them, which is why a few lines are enough here.

import { createHash, createPrivateKey, createPublicKey, randomUUID, sign } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import mqtt from 'mqtt';

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    args: { type: 'string', default: '{}' },
    key: { type: 'string' },
    url: { type: 'string', default: 'mqtt://127.0.0.1:1883' },
    ca: { type: 'string' },
    cert: { type: 'string' },
    'tls-key': { type: 'string' },
  },
});
const [root, name] = positionals;
if (!name || !options.key) {
  console.error('usage: node command.mjs ROOT NAME --key FILE [--args JSON] [--url URL]');
  process.exit(64);
}

/** RFC 8785. Refuses what JSON has not. */
function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(',')}]`;
  if (value !== null && typeof value === 'object') {
    const members = Object.keys(value).sort(); // by UTF-16 code units, as the RFC asks
    return `{${members.map((key) => `${JSON.stringify(key)}:${canonical(value[key])}`).join(',')}}`;
  }
  if (typeof value === 'number' && !Number.isFinite(value)) throw new Error(`no JSON: ${value}`);
  return JSON.stringify(value);
}

function signed(epoch) {
  const now = Date.now();
  const body = {
    schema: 'command/1.0',
    cmdId: randomUUID(),
    name,
    args: JSON.parse(options.args),
    issuedAt: new Date(now).toISOString(),
    expiresAt: new Date(now + 30_000).toISOString(),
    issuer: 'command.mjs',
    counter: now * 1000, // grows with every command of this key
    target: { root, epoch },
  };
  const key = createPrivateKey(readFileSync(options.key));
  const { x } = createPublicKey(key).export({ format: 'jwk' }); // the 32 bytes, base64url
  const keyId = createHash('sha256').update(Buffer.from(x, 'base64url')).digest('hex').slice(0, 16);
  const value = sign(null, Buffer.from(canonical(body)), key).toString('base64');
  return { ...body, sig: { keyId, alg: 'ed25519', value } };
}

const file = (path) => (path ? readFileSync(path) : undefined);
const client = mqtt.connect(options.url, {
  protocolVersion: 5,
  ca: file(options.ca),
  cert: file(options.cert),
  key: file(options['tls-key']),
});
const base = `${root}/insp/v1`;
let command;

setTimeout(() => {
  console.error(command ? 'the station does not answer' : 'no station there');
  process.exit(1);
}, 30_000);
client.on('error', (error) => console.error(`broker: ${error.message}`));
client.on('connect', () => client.subscribe([`${base}/sts/conn`, `${base}/rsp/+`], { qos: 1 }));
client.on('message', (_, payload) => {
  const message = JSON.parse(payload.toString('utf8'));
  if (message.schema === 'conn/1.0' && !command) {
    command = signed(message.epoch);
    client.publish(`${base}/in/cmd/${name}`, JSON.stringify(command), { qos: 1 });
  } else if (command && message.cmdId === command.cmdId && message.status !== 'IN_PROGRESS') {
    console.log(JSON.stringify(message, null, 2));
    client.end(false, () => process.exit(message.status === 'SUCCEEDED' ? 0 : 1));
  }
});
