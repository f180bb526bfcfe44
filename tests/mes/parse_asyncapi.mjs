// Parses AsyncAPI documents with the reference parser. Prints one JSON array a file: its errors.
import { createRequire } from 'node:module';
import { readFileSync } from 'node:fs';

const [packages, ...files] = process.argv.slice(2);
const { Parser } = createRequire(packages)('@asyncapi/parser');
const parser = new Parser();
for (const file of files) {
  const { document, diagnostics } = await parser.parse(readFileSync(file, 'utf8'));
  const found = diagnostics.map((item) => `${item.path.join('/')}: ${item.message}`);
  if (!document && !found.length) found.push('no document');
  console.log(JSON.stringify(found));
}
