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

// A timing whose physical floor is shorter than any launch, on a device whose empty kernel has not been timed. It has
// no floor to compare with (megamoe.report.measures).
function isLaunchBound(timing) {
  return timing.by === 'launch';
}

function floorText(timing) {
  if (timing.floor === null) return '–';
  return isLaunchBound(timing) ? 'launch' : `${micro(timing.floor)} ${timing.by}`;
}

function timingNumber(timing) {
  return timing?.median && timing.floor !== null && !isLaunchBound(timing) ? timing.floor / timing.median : null;
}

// A cell's number under a measure (the worst of the schedules shown) and its status.
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

// The subjects with something to show under a measure; a band of empty cells is not drawn.
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

// The matrix: a heat map for each op. In a grid each subject has a band of rows, in a listing a column.

const LETTER_WIDTH = 7.3,
  CELL_WIDTH = 48,
  GAP = 36;

function shownSubjects(op) {
  const used = new Set([...cells.values()].filter((cell) => opOf(cell.caseIndex) === op).map((cell) => cell.subject));
  return DATA.subjects
    .map((_, at) => at)
    .filter(
      (subject) =>
        used.has(subject) &&
        SUBJECT_PARTS.every((part, place) => state[part] === null || DATA.subjects[subject][place] === state[part]),
    );
}

function makeCell(caseIndex, subject, first) {
  const cell = caseIndex === null ? undefined : cells.get(cellKey(caseIndex, subject));
  const measure = measures.get(state.measure);
  const said = content(cell && reading(cell, measure, state.schedule), measure);
  const node = el('td', { role: 'gridcell', class: `${said.look}${first ? ' first' : ''}` }, said.text);
  const name = caseIndex === null ? 'no such case' : `${DATA.cases[caseIndex]} ${subjectName(subject)}`;
  node.setAttribute('aria-label', `${name}: ${caseIndex === null ? '' : said.spoken}`);
  if (!cell) return node;
  node.dataset.cell = cell.key;
  node.title = `${name}\n${said.spoken}${tooltip(cell)}`;
  node.tabIndex = -1;
  if (!matches(cell, state.filter)) node.classList.add('faded');
  if (cell.key === state.open) node.classList.add('open');
  const step = stepOf(cell, measure);
  if (step) {
    node.classList.add('changed');
    node.title += `\n${step}`;
  }
  return node;
}

// How a cell changed since the previous run, in words; null if it did not, or if there is no such run.
function stepOf(cell, measure) {
  if (measure.source === 'cold' || measure.source === 'hot') {
    const [before, now] = runs(cell[measure.source]).filter((one) => one.median).slice(-2);
    if (!now || (before.low <= now.high && now.low <= before.high)) return null;
    return `${micro(before.median)} µs on ${runLabel(before.run)}, now ${micro(now.median)} µs`;
  }
  for (const [name, records] of cell.schedules) {
    if (state.schedule !== null && name !== state.schedule) continue;
    const [before, now] = runs(records).slice(-2);
    if (now && before.status !== now.status)
      return `${before.status} on ${runLabel(before.run)} under ${DATA.schedules[name]}, now ${now.status}`;
  }
  return null;
}

function tooltip(cell) {
  const times = ['cold', 'hot'].map((name) => [name, last(cell[name])]).filter(([, timing]) => timing?.median);
  const told = times.map(([name, timing]) => `\n${name} ${micro(timing.median)} µs`).join('');
  const failed = worst(newest(cell, state.schedule));
  return told + (failed?.sentence ? `\n${failed.sentence.slice(0, 300)}` : '');
}

// Column headers, one line per axis. A border marks each change of the outermost axis.
function gridHead(block) {
  const starts = new Set();
  block.headers[0].reduce((at, [, span]) => (starts.add(at), at + span), 0);
  const lines = block.headers.map((line, depth) => {
    let at = 0;
    const heads = line.map(([value, span]) => {
      const first = starts.has(at) && at > 0;
      at += span;
      return el('th', { scope: 'col', colspan: span, class: first ? 'first' : null }, value);
    });
    return el('tr', {}, el('th', { class: 'axis', colspan: 2, scope: 'row' }, `${block.columns[depth]} →`), heads);
  });
  return { head: el('thead', {}, lines), starts };
}

// The lines of a grid in the chosen order: by subject, or by row.
function gridBands(block, subjects, names) {
  const rowName = (row) => `${block.row} ${block.rows[row]}`;
  const places = block.rows.map((_, row) => row);
  // Skip empty lines.
  const has = ([, , subject, row]) => block.cells[row].some((index) => index !== null && cells.has(cellKey(index, subject)));
  const bySubject = (subject) => places.map((row) => [names.get(subject), rowName(row), subject, row]).filter(has);
  const byRow = (row) => subjects.map((subject) => [rowName(row), names.get(subject), subject, row]).filter(has);
  return (state.order === 'row' ? places.map(byRow) : subjects.map(bySubject)).filter((lines) => lines.length);
}

function gridTable(block, subjects, names) {
  const { head, starts } = gridHead(block);
  const line = (subject, row) =>
    block.cells[row].map((index, at) => makeCell(index, subject, at > 0 && starts.has(at)));
  const bandHead = (name, rowspan) => el('th', { scope: 'rowgroup', rowspan, class: 'subject' }, name);
  const bands = gridBands(block, subjects, names).map((lines) =>
    lines.map(([band, name, subject, row], at) =>
      el('tr', {}, at ? null : bandHead(band, lines.length), el('th', { scope: 'row' }, name), line(subject, row)),
    ),
  );
  const bodies = bands.map((lines) => el('tbody', {}, lines));
  return el('table', { role: 'grid', class: 'heat', 'aria-label': block.title }, head, bodies);
}

function listTable(block, indexes, subjects, names) {
  const upright = (subject) => el('th', { scope: 'col', class: 'upright' }, el('span', {}, names.get(subject)));
  const rows = indexes.map((index) => {
    const label = clip(shortCase(index, block.shared));
    // On a narrow page, an id breaks between two axes, so that its results fit beside it.
    const axes = label.split(/(?<=,)/).flatMap((axis) => [axis, el('wbr')]);
    const head = el('th', { scope: 'row', class: 'case', title: DATA.cases[index] }, axes);
    return el(
      'tr',
      {},
      head,
      subjects.map((subject) => makeCell(index, subject, false)),
    );
  });
  const top = el('thead', {}, el('tr', {}, el('th'), subjects.map(upright)));
  return el('table', { role: 'grid', class: 'heat', 'aria-label': block.title }, top, el('tbody', {}, rows));
}

const FRESH = new Set([...cells.values()].filter(isOfNewestRun).map((cell) => cell.key));

// Whether a subject has anything to show here besides not_run and unsupported.
function hasResult(caseIndex, subject) {
  const cell = cells.get(cellKey(caseIndex, subject));
  return cell !== undefined && [...newest(cell, null), ...cell.cold, ...cell.hot].some((one) => !IDLE.includes(one.status));
}

const IDLE = ['unsupported', 'not_run'];

// Splits a listing into as many side-by-side tables as fit.
function listTables(block, subjects, names) {
  const matching = (index) =>
    subjects.some(
      (subject) => cells.has(cellKey(index, subject)) && matches(cells.get(cellKey(index, subject)), state.filter),
    );
  const fresh = (index) => subjects.some((subject) => FRESH.has(cellKey(index, subject)));
  const kept = firstThose(state.filter.length ? block.cases.filter(matching) : block.cases, fresh);
  const label = Math.max(...kept.map((index) => clip(shortCase(index, block.shared)).length), 8) * LETTER_WIDTH;
  const room = document.getElementById('main').clientWidth || 1200;
  const abreast = Math.max(1, Math.floor((room + GAP) / (label + subjects.length * CELL_WIDTH + GAP)));
  const rows = Math.max(6, Math.ceil(kept.length / abreast));
  const parts = Array.from({ length: Math.ceil(kept.length / rows) }, (_, at) =>
    kept.slice(at * rows, (at + 1) * rows),
  );
  return el(
    'div',
    { class: 'side-by-side' },
    parts.map((part) => listTable(block, part, subjects, names)),
  );
}

// A block with the subjects that have a cell in it, or null.
function makeBlock(block, candidates, names) {
  const indexes = (block.cells?.flat() ?? block.cases).filter((index) => index !== null);
  const present = candidates.filter((subject) => indexes.some((index) => cells.has(cellKey(index, subject))));
  if (!present.length) return null;
  const isFull = (subject) => indexes.some((index) => hasResult(index, subject));
  const [full, idle] = [present.filter(isFull), present.filter((subject) => !isFull(subject))];
  const fresh = (subject) => indexes.some((index) => FRESH.has(cellKey(index, subject)));
  const subjects = firstThose(full.length ? full : idle, fresh);
  const shared = block.shared.length ? el('small', {}, `all with ${block.shared.join(', ')}`) : null;
  const drawn = (which) =>
    block.cells ? el('div', { class: 'scroll' }, gridTable(block, which, names)) : listTables(block, which, names);
  const told = `${plural(idle.length, 'backend')} with no result here: ${idle.map((one) => names.get(one)).join(', ')}`;
  const folded = full.length && idle.length ? lazily({ class: 'folded' }, told, () => drawn(idle)) : null;
  return el(
    'div',
    { class: block.cells ? 'block' : 'block wide' },
    el('h3', {}, block.title, shared),
    drawn(subjects),
    folded,
  );
}

function makeOp(op) {
  const measure = measures.get(state.measure);
  const all = shownSubjects(op);
  const subjects = all.filter((subject) => subjectsWith(measure, state.schedule, op).has(subject));
  const { names, shared } = shortNames(subjects);
  const hidden = all.length - subjects.length;
  const note = [
    shared.length && subjects.length ? `on ${shared.join(', ')}` : '',
    hidden ? `${plural(hidden, 'subject')} without this measure` : '',
  ];
  const isFresh = (block) =>
    (block.cells?.flat() ?? block.cases).some((index) => subjects.some((one) => FRESH.has(cellKey(index, one))));
  const blocks = subjects.length
    ? firstThose(DATA.ops[op].blocks, isFresh).map((block) => makeBlock(block, subjects, names))
    : [];
  return el(
    'section',
    { class: 'op', 'data-op': op },
    el('h2', {}, op, ' ', el('small', {}, note.filter(Boolean).join('; '))),
    el('div', { class: 'blocks' }, blocks),
  );
}

function partValues(part) {
  return [...new Set(DATA.subjects.map((subject) => subject[part]))].sort(inOrder);
}

function matrixControls() {
  const pick = (name, label, options) =>
    options.length > 1
      ? choice(label, [[null, 'all'], ...options.map((value) => [value, value])], state[name], (value) =>
          set({ [name]: value }),
        )
      : null;
  const schedules = DATA.schedules.map((name, at) => [at, name]).sort((one, other) => inOrder(one[1], other[1]));
  const shownMeasures = DATA.measures.filter((measure) => subjectsWith(measure, null).size);
  return controls(
    'What the cells show',
    choice(
      'show',
      shownMeasures.map((measure) => [measure.name, measure.title, measure.meaning]),
      state.measure,
      (value) => set({ measure: value }),
    ),
    pick('op', 'op', Object.keys(DATA.ops)),
    SUBJECT_PARTS.map((part, at) => pick(part, part, partValues(at))),
    schedules.length > 1
      ? choice('schedule', [[null, 'worst'], ...schedules], state.schedule, (value) => set({ schedule: value }))
      : null,
    DATA.subjects.length > 1
      ? choice(
          'rows',
          [
            ['subject', 'by backend'],
            ['row', 'by row'],
          ],
          state.order,
          (value) => set({ order: value }),
        )
      : null,
  );
}

function tally() {
  const counts = new Map();
  for (const cell of cells.values()) {
    for (const record of newest(cell, null)) counts.set(record.status, (counts.get(record.status) ?? 0) + 1);
  }
  const shown = DATA.severity
    .filter((status) => counts.has(status))
    .map((status) =>
      el(
        'span',
        {},
        el('span', { class: `swatch ${status}` }, DATA.signs[status]),
        ` ${plain(counts.get(status))} ${status.replace('_', ' ')}`,
      ),
    );
  return el('p', { class: 'tally legend', 'aria-label': 'Rows by status' }, shown);
}

function matrixView() {
  const fresh = new Set([...FRESH].map((key) => opOf(cells.get(key).caseIndex)));
  const asked = Object.keys(DATA.ops).filter((op) => state.op === null || op === state.op);
  const ops = firstThose(asked, (op) => fresh.has(op));
  return [tally(), matrixControls(), legend(measures.get(state.measure)), ...ops.map(makeOp)];
}

// Focusable cells by visual line: tables side by side share lines.
function cellLines() {
  const lines = new Map();
  for (const node of document.querySelectorAll('#main td[data-cell]')) {
    push(lines, Math.round(node.getBoundingClientRect().top), node);
  }
  return [...lines.keys()].sort((one, other) => one - other).map((top) => lines.get(top));
}
