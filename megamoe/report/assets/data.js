'use strict';
// Decodes the data of the page. megamoe/report/encoding.py defines the form.

const DATA = JSON.parse(document.getElementById('data').textContent);
const SUBJECT_PARTS = ['backend', 'target', 'executor'];

// A cell is one case of one subject: records by schedule and timings by temperature, oldest first.
const cells = new Map();
const runOrder = new Map(DATA.runs.map((run, place) => [run.run, place]));

function cellKey(caseIndex, subject) {
  return `${caseIndex}.${subject}`;
}

function cellAt(caseIndex, subject) {
  const key = cellKey(caseIndex, subject);
  if (!cells.has(key)) {
    cells.set(key, { key, caseIndex, subject, schedules: new Map(), cold: [], hot: [] });
  }
  return cells.get(key);
}

function decodeRecord(row) {
  const [caseIndex, subject, schedule, run, status, sentence, metrics, counters, seconds, program, inputs, ...files] =
    row;
  const [bundle, artifact] = files;
  return {
    caseIndex,
    subject,
    schedule,
    run,
    metrics,
    counters,
    seconds,
    inputs,
    artifact,
    status: DATA.statuses[status],
    sentence: DATA.texts[sentence],
    program: program === null ? null : DATA.texts[program],
    bundle: bundle === null ? null : DATA.texts[bundle],
  };
}

function push(map, key, value) {
  if (!map.has(key)) map.set(key, []);
  map.get(key).push(value);
}

for (const row of DATA.records) {
  const record = decodeRecord(row);
  push(cellAt(record.caseIndex, record.subject).schedules, record.schedule, record);
}

function decodeTiming([caseIndex, subject, run, hot, status, sentence, how, spread, packed]) {
  const [method, launches, stopped, floor, by, discarded] = how;
  const [count, median, low, high] = spread ?? [0, null, null, null];
  return {
    caseIndex,
    subject,
    run,
    method,
    launches,
    stopped,
    floor,
    by,
    discarded,
    count,
    median,
    low,
    high,
    packed,
    temperature: hot ? 'hot' : 'cold',
    status: DATA.statuses[status],
    sentence: DATA.texts[sentence],
  };
}

for (const row of DATA.timings) {
  const timing = decodeTiming(row);
  cellAt(timing.caseIndex, timing.subject)[timing.temperature].push(timing);
}

const FIGURES = DATA.figures.map(([caseIndex, backend, target, run, assembler, program, cubin, kernels]) => ({
  caseIndex,
  run,
  kernels,
  backend: DATA.texts[backend],
  target: DATA.texts[target],
  assembler: DATA.texts[assembler],
  program: DATA.texts[program],
  cubin: cubin === null ? null : DATA.texts[cubin],
}));

// Natural order: A2 before A10.
const inOrder = new Intl.Collator('en', { numeric: true }).compare;

// The run of a row's newest line, except baselines: its rows and backends come first.
const NEWEST = Math.max(-1, ...[...DATA.records.map((row) => row[3]), ...DATA.timings.map((row) => row[2])]
  .map((run) => runOrder.get(DATA.run_ids[run]) ?? -1));

function isOfNewestRun(cell) {
  const lines = [...[...cell.schedules.values()].flat(), ...cell.cold, ...cell.hot];
  return lines.some((line) => runOrder.get(DATA.run_ids[line.run]) === NEWEST);
}

// The indices of a list, those that pass `test` first; each part keeps its order.
function firstThose(list, test) {
  return [...list.filter(test), ...list.filter((one) => !test(one))];
}

function last(list) {
  return list[list.length - 1];
}

function subjectName(subject) {
  return DATA.subjects[subject].join(' ');
}

// Names made of the parts in which these subjects differ; a heading shows the shared parts once.
function shortNames(subjects) {
  const differing = [0, 1, 2].filter((part) => new Set(subjects.map((one) => DATA.subjects[one][part])).size > 1);
  const shown = differing.length ? differing : [0];
  const shared = [0, 1, 2].filter((part) => !shown.includes(part)).map((part) => DATA.subjects[subjects[0]]?.[part]);
  return {
    names: new Map(subjects.map((one) => [one, shown.map((part) => DATA.subjects[one][part]).join(' ')])),
    shared,
  };
}

function opOf(caseIndex) {
  return DATA.cases[caseIndex].split(':', 1)[0];
}

function shortCase(caseIndex, shared = []) {
  const id = DATA.cases[caseIndex];
  const parts = id
    .slice(id.indexOf(':') + 1)
    .split(',')
    .filter((part) => !shared.includes(part));
  return parts.join(',') || id;
}

function toNumber(value) {
  return typeof value === 'string' ? Number(value) : value;
}

// The [name, value] pairs at an index of the table of metrics or counters.
function named(kind, place) {
  const [names, numbers] = DATA[kind][place];
  return DATA.names[names].map((name, at) => [name, numbers[at]]);
}

// The newest record of each schedule shown.
function newest(cell, schedule) {
  const found = [];
  for (const [name, records] of cell.schedules) {
    if (schedule === null || name === schedule) found.push(last(records));
  }
  return found;
}

function worst(records) {
  const rank = (record) => DATA.severity.indexOf(record.status);
  return records.reduce((one, other) => (one === undefined || rank(other) < rank(one) ? other : one), undefined);
}

const LETTERS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_';

// A timing's samples in microseconds, in the order taken. Only the newest timings have samples in the page.
function samplesOf(timing) {
  const [low, high, letters] = timing.packed ?? [0, 0, ''];
  const step = (at) => LETTERS.indexOf(letters[2 * at]) * 64 + LETTERS.indexOf(letters[2 * at + 1]);
  return Array.from({ length: letters.length / 2 }, (_, at) => low + ((high - low) * step(at)) / 4095);
}

// Quotes like Python's shlex.quote, for a shell.
function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
}

// The sentence of a record ends with its rerun command; the page shows that elsewhere.
function withoutRerun(sentence) {
  return sentence.replace(/ Rerun: (megamoe run|nox -s bench) [^\n]*$/, '');
}

// The judge's sentence about a row: one line per tensor, bold where its error is worst.
function sentenceLines(text) {
  const lines = withoutRerun(text).split(/(?:; |(?<=: ))(?=tensor \S+: )/);
  return lines.map((line) => {
    const [, before, worstPlace, after] = /^(.*?)(worst at [^:;]+)(.*)$/s.exec(line) ?? [null, line, '', ''];
    return el('span', { class: 'said' }, before, worstPlace ? el('b', {}, worstPlace) : null, after);
  });
}

function rerun(cell, schedule) {
  const [backend, target, executor] = DATA.subjects[cell.subject];
  const options = { case: DATA.cases[cell.caseIndex], backend, target, executor, schedule };
  return ['megamoe', 'run', ...Object.entries(options).flatMap(([name, value]) => [`--${name}`, quoted(value)])].join(
    ' ',
  );
}
