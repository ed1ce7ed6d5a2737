'use strict';
// The view of the comparison that megamoe.diff made of these records and others.

const COMPARED = 'kind case backend target executor variant call regression sentence was is times changes'.split(' ');
const GOOD_CALLS = ['FASTER', 'BETTER'];
const EVEN_CALLS = ['SAME', 'NEW', 'CHANGED', 'AMBIGUOUS'];

function comparedRows() {
  return DATA.comparison.rows.map((row) => Object.fromEntries(COMPARED.map((name, at) => [name, row[at]])));
}

function callLook(row) {
  if (row.regression) return 'call-bad';
  return GOOD_CALLS.includes(row.call) ? 'call-good' : EVEN_CALLS.includes(row.call) ? 'call-even' : 'call-bad';
}

function comparedMatches(row) {
  const text = [DATA.cases[row.case], row.backend, row.target, row.executor, row.variant, row.call, row.kind]
    .join(' ')
    .toLowerCase();
  const exact = text.replace(':', ' ').split(/[\s,]+/);
  return state.filter.every((word) => (word.includes('=') ? exact.includes(word) : text.includes(word)));
}

// The reach of the plots on either side of a ratio of 1: a round number, at most 1.
function ratioSpan(rows) {
  const far = rows
    .filter((row) => row.times)
    .map(({ times: [, , ratio, , , threshold] }) => Math.max(Math.abs(ratio - 1) * 1.2, (threshold ?? 0) * 2));
  return [0.05, 0.1, 0.2, 0.5].find((span) => far.every((one) => one <= span)) ?? 1;
}

function comparedLine(row, span) {
  const [before, after, ratio] = row.times ?? [null, null, null];
  const told =
    ratio === null
      ? row.was !== row.is
        ? `${row.was ?? 'none'} → ${row.is ?? 'none'}`
        : ''
      : `${micro(before)} → ${micro(after)} µs`;
  const cells_ = [
    el('td', { class: `nowrap ${callLook(row)}` }, `${row.regression ? '▲ ' : ''}${row.call}`),
    el(
      'td',
      {},
      el('span', { class: 'mono' }, DATA.cases[row.case]),
      el('br'),
      [row.backend, row.target, row.executor, row.variant].filter(Boolean).join(' '),
    ),
    el('td', { class: 'number' }, told),
    el('td', {}, ratio === null ? '' : ratioPlot(row.times, span)),
    el('td', { class: 'number' }, ratio === null ? '' : plain(ratio, 4)),
    el(
      'td',
      {},
      row.changes.map((step) => [step, el('br')]),
      withoutRerun(DATA.texts[row.sentence]),
    ),
  ];
  const subject = DATA.subjects.findIndex(
    (one) => one[0] === row.backend && one[1] === row.target && (row.kind === 'figures' || one[2] === row.executor),
  );
  const cell = cells.get(cellKey(row.case, subject));
  const line = el('tr', {}, cells_);
  return cell ? openable(cell, line) : line;
}

function callChips(rows) {
  const chips = Object.entries(DATA.comparison.counts).map(([call, count]) =>
    el(
      'button',
      {
        type: 'button',
        'aria-pressed': String(state.calls.includes(call)),
        onclick: () =>
          set({
            calls: state.calls.includes(call) ? state.calls.filter((one) => one !== call) : [...state.calls, call],
          }),
      },
      `${call} ${plain(count)}`,
    ),
  );
  return el(
    'div',
    { class: 'chips controls', role: 'group', 'aria-label': 'Calls shown' },
    chips,
    el('span', { class: 'muted' }, `${plural(rows.length, 'row')} shown`),
  );
}

const MAX_COMPARED = 1000;

function comparedTable(rows) {
  const span = ratioSpan(rows);
  const columns = ['call', 'row', 'before → after#', `−${span * 100}% … +${span * 100}%`, 'ratio#', 'what changed'];
  const lines = rows.slice(0, MAX_COMPARED).map((row) => comparedLine(row, span));
  return rowsTable('Compared rows', columns, lines);
}

function comparisonView() {
  const found = DATA.comparison;
  const how = el('code', {}, 'megamoe report --against BASE');
  if (!found) return [el('p', {}, 'Nothing was compared. ', how, ' holds these records against a file or a revision.')];
  const rows = comparedRows().filter((row) => state.calls.includes(row.call) && comparedMatches(row));
  const marked = `▲ marks what makes the comparison fail (exit status ${found.status})`;
  return [
    el('h2', {}, found.line),
    muted(`${found.before} → ${found.after}; ${marked}; ratios have their 99% interval, and a band for the threshold`),
    [...found.across, ...found.notes].map((note) => el('p', {}, note)),
    callChips(rows),
    comparedTable(rows),
    rows.length > MAX_COMPARED ? muted(`${plain(rows.length - MAX_COMPARED)} more: narrow the filter`) : null,
  ];
}
