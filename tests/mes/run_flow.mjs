// Runs the function nodes of a Node-RED flow on messages, as Node-RED would call them.
// stdin: {"flow": [...], "node": id, "messages": [...]}; stdout: what each call returned.
import { readFileSync } from 'node:fs';

const { flow, node, messages } = JSON.parse(readFileSync(0, 'utf8'));
const memory = new Map();
const context = { get: (key) => memory.get(key), set: (key, value) => memory.set(key, value) };
const run = new Function('msg', 'context', flow.find((item) => item.id === node).func);
console.log(JSON.stringify(messages.map((payload) => run({ payload }, context))));
