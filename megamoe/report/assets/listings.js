'use strict';
// The table views: megamoe.diff's comparison, the VM's coverage, the origin of the lines.

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

// The VM's coverage of the PTX ISA, by family, and what confirms each form.

function families() {
  const found = new Map();
  for (const [family, form, place, witness, ...kernels] of DATA.coverage)
    push(found, family, { form, place, witness, kernels });
  return found;
}

function formTable(family, forms) {
  return table(
    family,
    ['form*', 'PTX ISA', 'witness', 'second kernel'],
    forms.map((one) => [el('code', {}, one.form), one.place, one.witness, one.kernels.join(', ')]),
  );
}

function familyRow(family, forms) {
  const kept = forms.filter((one) =>
    state.filter.every((word) =>
      `${family} ${one.form} ${one.witness} ${one.kernels.join(' ')}`.toLowerCase().includes(word),
    ),
  );
  if (!kept.length) return null;
  const hardware = kept.filter((one) => one.witness === 'hardware').length;
  const second = kept.filter((one) => one.kernels.length).length;
  const bar = el('span', { class: 'hardware' });
  bar.style.width = `${(hardware / kept.length) * 100}%`;
  const told = `${plural(kept.length, 'form')}, ${hardware} by hardware, ${second} in a second kernel`;
  return el(
    'details',
    { class: 'family', open: state.filter.length > 0 },
    el('summary', {}, el('b', {}, family), el('span', { class: 'track' }, bar), el('span', { class: 'muted' }, told)),
    formTable(family, kept),
  );
}

function foreignTable() {
  const rows = DATA.foreign
    .filter((one) => state.filter.every((word) => Object.values(one).join(' ').toLowerCase().includes(word)))
    .map((one) => [
      one.package,
      one.target,
      one.kernel,
      `${one.options} ${one.shape}`,
      one.status,
      one.error === null ? '' : plain(one.error),
      one.reason,
    ]);
  return table(
    'Kernels by others',
    ['package', 'target', 'kernel', 'options and shape', 'status', 'error#', 'reason'],
    rows,
  );
}

function coverageView() {
  if (!DATA.coverage.length)
    return [
      el(
        'p',
        {},
        'results/coverage.md is not beside these records. ',
        el('code', {}, 'python -m backends.vm.coverage'),
        ' writes it.',
      ),
    ];
  const count = (test) => DATA.coverage.filter(test).length;
  return [
    el('h2', {}, 'What the PTX virtual machine implements'),
    el(
      'p',
      { class: 'muted' },
      `${plural(DATA.coverage.length, 'form')} in ${plural(families().size, 'family').replace('familys', 'families')}: ${count((one) => one[3] === 'hardware')} witnessed by hardware (it ran on a GPU, and what it gave is test data here), the others by the ISA's text; ${count((one) => one.length > 4)} also ran in kernels by others.`,
    ),
    [...families()].map(([family, forms]) => familyRow(family, forms)),
    DATA.foreign.length
      ? el('section', { class: 'block' }, el('h3', {}, 'Kernels by others in the VM'), foreignTable())
      : null,
  ];
}

// The origin of the lines: files, runs, machines, versions, and accepted changes.

function revision(text) {
  if (!text) return 'unknown';
  const [commit, changes] = text.split('+');
  return commit.slice(0, 10) + (changes ? '+changes' : '');
}

function deviceText(device) {
  if (!device) return 'no device';
  const clocks = [
    device.sm_clock_mhz && `SM ${device.sm_clock_mhz} MHz`,
    device.memory_clock_mhz && `memory ${device.memory_clock_mhz} MHz`,
    device.power_limit_w && `${plain(device.power_limit_w)} W`,
  ];
  const ceilings = [
    device.copy_bytes_per_s && `copy ${plain(device.copy_bytes_per_s / 1e12)} TB/s`,
    device.bf16_flops_per_s && `bf16 ${plain(device.bf16_flops_per_s / 1e12)} TFLOP/s`,
    device.flushed_l2_ratio && `flush ${plain(device.flushed_l2_ratio)}×`,
  ];
  return [
    `${device.name} (${device.compute_capability}), driver ${device.driver}, toolkit ${device.toolkit}`,
    ...clocks,
    ...ceilings,
  ]
    .filter(Boolean)
    .join(', ');
}

function versionText(run) {
  const own = [
    ['megamoe', run.megamoe],
    ['python', run.python],
    ['torch', run.torch],
    ['numpy', run.numpy],
    ...Object.entries(run.software),
  ];
  return own
    .filter(([, version]) => version)
    .map(([name, version]) => `${name} ${version}`)
    .join(', ');
}

function provenance() {
  const run = last(DATA.runs);
  if (!run) return ['no header: the origin of these lines is unknown'];
  const timed = [...new Set(DATA.timings.map(decodeTiming).map(deviceOf))].filter(Boolean);
  return [
    'newest run ',
    el('b', {}, `${run.started.slice(0, 16).replace('T', ' ')} UTC`),
    ' at revision ',
    el('b', {}, revision(run.git_revision)),
    ` · ${run.device?.name ?? 'no device'} · ${run.platform} · ${versionText(run)} · `,
    `${plural(DATA.records.length, 'record')} and ${plural(DATA.timings.length, 'timing')} of ${plural(DATA.runs.length, 'run')}`,
    timed.length ? ` · times of: ${timed.join(', ')}` : '',
  ];
}

const MAX_STEPS = 4;

function manySteps(steps) {
  if (steps.length <= MAX_STEPS) return steps.join('; ');
  return lazily({}, `${plain(steps.length)} numbers`, () => steps.join('; '));
}

function acceptanceTable(acceptances) {
  return table(
    'accepted changes',
    ['row*', 'reason', 'accepted', 'revision', 'changes'],
    acceptances.map((one) => [
      one.row,
      one.reason,
      one.accepted,
      revision(one.git_revision),
      manySteps(Object.entries(one.changes).map(([name, step]) => `${name} ${step}`)),
    ]),
  );
}

function runsTable() {
  const count = (lines, field, run) => lines.filter((line) => DATA.run_ids[line[field]] === run).length;
  return table(
    'Runs',
    ['run*', 'started', 'revision', 'device', 'host', 'versions', 'owed#', 'records#', 'timings#'],
    DATA.runs
      .toReversed()
      .map((run) => [
        run.run,
        run.started.slice(0, 19).replace('T', ' '),
        revision(run.git_revision),
        deviceText(run.device),
        `${run.platform}, ${run.cpu_count ?? '?'} CPUs`,
        versionText(run),
        plain(run.owed_rows),
        plain(count(DATA.records, 3, run.run)),
        plain(count(DATA.timings, 2, run.run)),
      ]),
  );
}

function runsView() {
  return [
    el('h2', {}, 'Runs'),
    runsTable(),
    el(
      'div',
      { class: 'block' },
      el('h3', {}, 'Files'),
      table(
        'Files',
        ['file*', 'lines#'],
        DATA.sources.map((source) => [source.path, plain(source.lines)]),
      ),
    ),
    DATA.acceptances.length
      ? el('div', { class: 'block' }, el('h3', {}, 'Accepted changes'), acceptanceTable(DATA.acceptances))
      : null,
    el(
      'p',
      { class: 'muted' },
      `Made ${DATA.made.at} UTC by megamoe ${DATA.made.by} at revision ${revision(DATA.made.revision)}.`,
    ),
  ];
}
