'use strict';
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
  return node;
}

function tooltip(cell) {
  const times = ['cold', 'hot'].map((name) => [name, last(cell[name])]).filter(([, timing]) => timing?.median);
  const told = times.map(([name, timing]) => `\n${name} ${micro(timing.median)} µs`).join('');
  const failed = worst(newest(cell, state.schedule));
  return told + (failed?.sentence ? `\n${failed.sentence.slice(0, 300)}` : '');
}

// Column headers, a line for each axis. A border marks each change of the outermost axis.
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
  const bySubject = (subject) => places.map((row) => [names.get(subject), rowName(row), subject, row]);
  const byRow = (row) => subjects.map((subject) => [rowName(row), names.get(subject), subject, row]);
  return state.order === 'row' ? places.map(byRow) : subjects.map(bySubject);
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
    const head = el('th', { scope: 'row', class: 'case', title: DATA.cases[index] }, label);
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

// Cuts a listing into as many tables side by side as fit.
function listTables(block, subjects, names) {
  const matching = (index) =>
    subjects.some(
      (subject) => cells.has(cellKey(index, subject)) && matches(cells.get(cellKey(index, subject)), state.filter),
    );
  const kept = state.filter.length ? block.cases.filter(matching) : block.cases;
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
  const subjects = candidates.filter((subject) => indexes.some((index) => cells.has(cellKey(index, subject))));
  if (!subjects.length) return null;
  const shared = block.shared.length ? el('small', {}, `all with ${block.shared.join(', ')}`) : null;
  const body = block.cells
    ? el('div', { class: 'scroll' }, gridTable(block, subjects, names))
    : listTables(block, subjects, names);
  return el('div', { class: block.cells ? 'block' : 'block wide' }, el('h3', {}, block.title, shared), body);
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
  const blocks = subjects.length ? DATA.ops[op].blocks.map((block) => makeBlock(block, subjects, names)) : [];
  return el(
    'section',
    { class: 'op', 'data-op': op },
    el('h2', {}, op, ' ', el('small', {}, note.filter(Boolean).join('; '))),
    el('div', { class: 'blocks' }, blocks),
  );
}

function partValues(part) {
  return [...new Set(DATA.subjects.map((subject) => subject[part]))].sort();
}

function matrixControls() {
  const pick = (name, label, options) =>
    options.length > 1
      ? choice(label, [[null, 'all'], ...options.map((value) => [value, value])], state[name], (value) =>
          set({ [name]: value }),
        )
      : null;
  const schedules = DATA.schedules.map((name, at) => [at, name]).sort((one, other) => (one[1] < other[1] ? -1 : 1));
  const shownMeasures = DATA.measures.filter((measure) => subjectsWith(measure, null).size);
  return el(
    'div',
    { class: 'controls', role: 'group', 'aria-label': 'What the cells show' },
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
  const ops = Object.keys(DATA.ops).filter((op) => state.op === null || op === state.op);
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
