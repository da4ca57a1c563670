// SPDX-License-Identifier: MIT
// Runs SQL files in the trace processor of the Perfetto UI, without a browser:
//
//     node tests/trace/perfetto.js FOLDER TRACE SQL...
//
// FOLDER has the UI's engine_bundle.js and trace_processor*.wasm. Prints one JSON object per SQL file, one line each:
// {"columns": [...], "rows": [[...], ...]} or {"error": "..."}. The engine is a worker that speaks the protocol of
// protos/perfetto/trace_processor/trace_processor.proto; here this program is its page.
'use strict';
const fs = require('fs'), path = require('path'), zlib = require('zlib');

const APPEND = 1, FINALIZE = 2, QUERY = 3; // TraceProcessorMethod
const replies = [];
let arrived = null; // resolves when a reply arrives

// ---- protobuf ----

function varint(value) {
  const bytes = [];
  for (let v = BigInt(value); ; v >>= 7n) {
    bytes.push(Number(v & 127n) | (v > 127n ? 128 : 0));
    if (v <= 127n) return Buffer.from(bytes);
  }
}

function field(number, content) {
  return Buffer.isBuffer(content)
    ? Buffer.concat([varint(number << 3 | 2), varint(content.length), content])
    : Buffer.concat([varint(number << 3), varint(content)]);
}

function readVarint(bytes, at) {
  let value = 0n;
  for (let shift = 0n; ; shift += 7n) {
    const byte = bytes[at.next++];
    value |= BigInt(byte & 127) << shift;
    if (byte < 128) return BigInt.asIntN(64, value);
  }
}

// Calls back with the number and the content of each field.
function fields(bytes, callback) {
  for (const at = {next: 0}; at.next < bytes.length;) {
    const key = Number(readVarint(bytes, at)), wire = key & 7;
    let content;
    if (wire === 0) {
      content = readVarint(bytes, at);
    } else {
      const size = wire === 1 ? 8 : wire === 5 ? 4 : Number(readVarint(bytes, at));
      content = bytes.subarray(at.next, at.next + size);
      at.next += size;
    }
    callback(key >> 3, content);
  }
}

// Adds the cells of one batch. Their types come first, then the values of each type.
function batch(bytes, cells) {
  const types = [], integers = [], floats = [];
  let strings = [], last = false;
  fields(bytes, (number, content) => {
    const at = {next: 0};
    if (number === 1) while (at.next < content.length) types.push(Number(readVarint(content, at)));
    if (number === 2) while (at.next < content.length) integers.push(Number(readVarint(content, at)));
    if (number === 3) for (let i = 0; i < content.length; i += 8) floats.push(content.readDoubleLE(i));
    if (number === 5) strings = content.toString('utf8').split('\0');
    if (number === 6) last = content !== 0n;
  });
  const sources = {1: () => null, 2: () => integers.shift(), 3: () => floats.shift(), 4: () => strings.shift()};
  for (const type of types) cells.push(sources[type]());
  return last;
}

// ---- the worker's page ----

const port = {
  onmessage: null,
  postMessage(bytes) {
    fields(Buffer.from(bytes), (_, message) => replies.push(message));
    if (arrived) arrived();
  },
};

function start(folder) {
  globalThis.self = globalThis;
  globalThis.WorkerGlobalScope = class {};
  globalThis.importScripts = () => {};
  Object.defineProperty(globalThis, 'location', {value: {href: 'file:///engine_bundle.js'}, configurable: true});
  Object.defineProperty(globalThis, 'navigator', {value: {language: 'en'}, configurable: true});
  // The engine looks for node's own ways to read files if it sees them.
  const hidden = process;
  globalThis.process = undefined;
  globalThis.XMLHttpRequest = class { // the engine loads its wasm synchronously
    open(_, url) {
      this.response = fs.readFileSync(path.join(folder, path.basename(url)));
    }
    send() {}
  };
  try {
    (0, eval)(fs.readFileSync(path.join(folder, 'engine_bundle.js'), 'utf8'));
  } finally {
    globalThis.process = hidden;
  }
}

let sequence = 0;

// Sends a request and returns its replies: one, or for a query all batches.
async function request(method, extra) {
  const message = Buffer.concat([field(1, ++sequence), field(2, method), extra]);
  const cells = [], result = {columns: [], rows: []};
  replies.length = 0;
  port.onmessage({data: new Uint8Array(field(1, message))});
  for (let last = false; !last;) {
    while (!replies.length) await new Promise((resolve) => { arrived = resolve; });
    fields(replies.shift(), (number, content) => {
      if (number === 5) throw new Error(content.toString());
      if (number === 201) fields(content, (n, text) => { if (n === 2 && text.length) result.error = text.toString(); });
      if (number !== 203) return;
      fields(content, (n, part) => {
        if (n === 1) result.columns.push(part.toString());
        if (n === 2 && part.length) result.error = part.toString();
        if (n === 3) last = batch(part, cells);
      });
    });
    last = last || method !== QUERY || result.error !== undefined;
  }
  for (let i = 0; result.columns.length && i < cells.length; i += result.columns.length)
    result.rows.push(cells.slice(i, i + result.columns.length));
  return result;
}

async function main([folder, trace, ...queries]) {
  if (!queries.length) throw new Error('usage: node perfetto.js FOLDER TRACE SQL...');
  console.warn = console.log = () => {}; // what the engine says
  start(folder);
  await new Promise((resolve) => setTimeout(resolve, 0)); // the engine's own promises come first
  globalThis.onmessage({data: port});
  let bytes = fs.readFileSync(trace);
  if (bytes[0] === 0x1f && bytes[1] === 0x8b) bytes = zlib.gunzipSync(bytes);
  for (let at = 0; at < bytes.length; at += 1 << 20) {
    const reply = await request(APPEND, field(101, bytes.subarray(at, at + (1 << 20))));
    if (reply.error) throw new Error(reply.error);
  }
  await request(FINALIZE, Buffer.alloc(0));
  for (const query of queries) {
    const sql = query.startsWith('sql:') ? query.slice(4) : fs.readFileSync(query, 'utf8');
    process.stdout.write(JSON.stringify(await request(QUERY, field(103, field(1, Buffer.from(sql))))) + '\n');
  }
}

main(process.argv.slice(2)).then(() => process.exit(0), (error) => {
  process.stderr.write(`perfetto.js: ${error.stack}\n`);
  process.exit(1);
});
