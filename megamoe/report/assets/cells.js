'use strict';
// A cell of the heat map under a measure: its text, a class for its colour, and words for a screen reader.

const measures = new Map(DATA.measures.map((measure) => [measure.name, measure]));

function level(measure, value) {
  const number = toNumber(value);
  if (Number.isNaN(number)) return 6;
  return measure.bounds.filter((bound) => (measure.higher_is_better ? number < bound : number > bound)).length;
}

function recordNumber(record, measure) {
  if (measure.source === 'metrics') return DATA.metrics[record.metrics][2]?.[0] ?? null;
  return DATA.counters[record.counters][2][measure.name] ?? null;
}

function timingNumber(timing) {
  return timing && timing.floor !== null && timing.median ? timing.floor / timing.median : null;
}

// The number of a cell under a measure (the worst of the schedules shown) and its status.
function reading(cell, measure, schedule) {
  if (measure.source === 'cold' || measure.source === 'hot') {
    const timing = last(cell[measure.source]);
    return timing && { status: timing.status, value: timingNumber(timing), timing };
  }
  const records = newest(cell, schedule);
  if (!records.length) return undefined;
  const record = worst(records);
  if (measure.source === 'status') return { status: record.status, value: null, records };
  const values = records.map((one) => recordNumber(one, measure)).filter((value) => value !== null);
  const value = values.length ? values.reduce((one, other) => (toNumber(other) > toNumber(one) ? other : one)) : null;
  return { status: record.status, value, records };
}

function verdictText(found) {
  const sign = DATA.signs[found.status];
  const { records } = found;
  if (!records || records.length === 1) return [sign];
  const alike = records.filter((record) => record.status === found.status).length;
  return [sign, el('span', { class: 'of' }, alike === records.length ? `${alike}` : `${alike}/${records.length}`)];
}

function content(found, measure) {
  if (found === undefined) return { text: [''], look: 'absent', spoken: 'no result' };
  if (measure.source === 'status') return { text: verdictText(found), look: found.status, spoken: found.status };
  if (found.value === null) {
    if (found.status === 'passed') return { text: ['·'], look: 'absent', spoken: 'passed, not measured' };
    return { text: [DATA.signs[found.status]], look: found.status, spoken: found.status };
  }
  const text = brief(found.value, measure.style);
  const spoken = `${measure.title} ${text}, ${found.status}`;
  if (found.status !== 'passed') return { text: [DATA.signs[found.status], text], look: found.status, spoken };
  return { text: [text], look: `level${level(measure, found.value)}`, spoken };
}

const measured = new Map();

// The subjects with anything to show under a measure: a band of empty cells is not drawn.
function subjectsWith(measure, schedule, op = null) {
  const key = `${measure.name} ${schedule} ${op}`;
  if (!measured.has(key)) {
    const found = new Set();
    for (const cell of cells.values()) {
      if (found.has(cell.subject) || (op !== null && opOf(cell.caseIndex) !== op)) continue;
      const seen = reading(cell, measure, schedule);
      if (seen && (measure.source === 'status' || seen.value !== null || seen.status !== 'passed'))
        found.add(cell.subject);
    }
    measured.set(key, found);
  }
  return measured.get(key);
}

function words(text) {
  return text.toLowerCase().split(/\s+/).filter(Boolean);
}

function haystack(cell) {
  const records = newest(cell, null);
  const parts = DATA.cases[cell.caseIndex].replace(':', ',').split(',');
  const statuses = [...records, ...cell.cold, ...cell.hot].map((one) => one.status);
  const sentences = records.map((record) => record.sentence);
  return {
    exact: new Set([...parts, ...DATA.subjects[cell.subject], ...statuses].map((part) => part.toLowerCase())),
    text: [DATA.cases[cell.caseIndex], subjectName(cell.subject), ...sentences].join(' ').toLowerCase(),
  };
}

// Every word must match. axis=value matches whole, so hd=64 does not match hd=640; `-word` must not match.
function matches(cell, filter) {
  if (!filter.length) return true;
  cell.haystack ??= haystack(cell);
  return filter.every((word) => {
    const wanted = word.startsWith('-') && word.length > 1 ? word.slice(1) : word;
    const found = cell.haystack.exact.has(wanted) || (!wanted.includes('=') && cell.haystack.text.includes(wanted));
    return found !== (wanted !== word);
  });
}

// The label of a level: its bound, or for the last level the bound that it exceeds.
function limit(measure, at) {
  const spelt = measure.bounds.map((bound) => (measure.style === 'percent' ? `${bound * 100}%` : String(bound)));
  const [inner, outer] = measure.higher_is_better ? ['≥', '<'] : ['≤', '>'];
  return at < spelt.length ? `${inner} ${spelt[at]}` : `${outer} ${last(spelt)}`;
}

function legendKey(look, sign, meaning) {
  return el('span', { class: 'key' }, el('span', { class: `swatch ${look}` }, sign), meaning);
}

function legend(measure) {
  const statuses = DATA.severity.toReversed();
  const signs = statuses.map((status) => legendKey(status, DATA.signs[status], status.replace('_', ' ')));
  const steps = measure.bounds.length ? [...measure.bounds.keys(), measure.bounds.length] : [];
  const levels = steps.map((at) => legendKey(`level${at}`, '', limit(measure, at)));
  const shown = levels.length
    ? [levels, legendKey('absent', '·', 'not measured'), signs.slice(1)]
    : [signs, legendKey('absent', ' ', 'blank: no result')];
  return el('div', { class: 'legend', 'aria-label': 'Legend' }, el('span', {}, `${measure.meaning}:`), shown);
}
