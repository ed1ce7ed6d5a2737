'use strict';
// The drawer of a row: everything that the page knows about one case of one subject.

function selectedRecord(cell) {
  const shown = newest(cell, null);
  return (
    shown.find((record) => record.schedule === state.detailSchedule) ??
    worst(newest(cell, state.schedule)) ??
    worst(shown)
  );
}

function scheduleChips(cell, record) {
  const names = [...cell.schedules.keys()].sort((one, other) => inOrder(DATA.schedules[one], DATA.schedules[other]));
  if (names.length < 2) return null;
  const chips = names.map((name) => {
    const newestOne = last(cell.schedules.get(name));
    return el(
      'button',
      {
        type: 'button',
        class: newestOne.status,
        'aria-pressed': String(newestOne === record),
        onclick: () => set({ detailSchedule: name }),
      },
      `${DATA.signs[newestOne.status]} ${DATA.schedules[name]}`,
    );
  });
  return section('schedules', el('div', { class: 'chips' }, chips));
}

// What a row's evidence covers: a digest identifies a text that a machine ran, and nothing else.
function whatRan(record) {
  const named = DATA.inputs[record.artifact].map(([name, text]) => `${DATA.texts[name]} ${DATA.texts[text]}`).join(', ');
  if (!named) return record.program && 'the text of this digest';
  return record.program
    ? `a host object that brings this PTX, or code made from it: ${named}`
    : `a Python call, of which outputs and times alone are claimed: ${named}`;
}

function verdictSection(cell, record) {
  const command = rerun(cell, DATA.schedules[record.schedule]);
  const sentence = record.sentence
    ? el(
        'p',
        { class: 'sentence', tabindex: 0, role: 'region', 'aria-label': 'Sentence' },
        sentenceLines(record.sentence),
      )
    : null;
  const run = DATA.runs[runOrder.get(DATA.run_ids[record.run])];
  const known = facts([
    [
      'run',
      `${DATA.run_ids[record.run]}${run ? `, ${run.started.slice(0, 16)} UTC, revision ${revision(run.git_revision)}` : ''}`,
    ],
    ['PTX sha256', record.program],
    ['what ran', whatRan(record)],
    ['judged in', record.seconds === null ? null : `${plain(record.seconds)} s on the host, never a time of a GPU`],
  ]);
  return section(
    'verdict',
    sentence,
    el('div', { class: 'command' }, el('code', {}, command), copyButton(command)),
    known,
  );
}

function metricsSection(record) {
  const metrics = new Map(named('metrics', record.metrics));
  const held = [...metrics.keys()].filter((name) => metrics.has(`${name}.bar`));
  if (!metrics.size) return null;
  const ratio = (name) => toNumber(metrics.get(name)) / toNumber(metrics.get(`${name}.bar`));
  const rows = held.map((name) => [
    name,
    plain(metrics.get(name)),
    plain(metrics.get(`${name}.bar`)),
    brief(ratio(name)),
    barPlot(ratio(name)),
  ]);
  const others = [...metrics].filter(([name]) => !metrics.has(`${name}.bar`) && !name.endsWith('.bar'));
  const bar = DATA.ops[opOf(record.caseIndex)].cosine,
    published = DATA.ops[opOf(record.caseIndex)].published.includes(record.caseIndex);
  const noted = (name) =>
    name.endsWith('.cosine')
      ? published
        ? `published bar: at least ${bar}`
        : 'held to no bar: not a published cell'
      : '';
  const rest = others.map(([name, value]) => [
    name,
    typeof value === 'number' && name.endsWith('.cosine') ? value.toFixed(9) : plain(value),
    noted(name),
  ]);
  return section(
    'errors against their bars',
    rows.length ? table('errors', ['metric', 'value#', 'bar#', 'ratio#', ''], rows) : null,
    rest.length ? table('other metrics', ['metric', 'value#', ''], rest) : null,
  );
}

function agreementSection(cell, record) {
  const [, target, executor] = DATA.subjects[cell.subject];
  const found = DATA.agreements.filter(
    (one) =>
      one.case === cell.caseIndex &&
      one.target === target &&
      one.executor === executor &&
      one.schedule === DATA.schedules[record.schedule],
  );
  if (!found.length) return null;
  const newestOne = last(found);
  const rows = named('metrics', newestOne.metrics).map(([name, value]) => [name, plain(value)]);
  return section(
    `agreement of ${newestOne.backends.join(', ')}`,
    newestOne.alone ? el('p', {}, el('b', {}, `${newestOne.alone} stands alone. `), newestOne.sentence) : null,
    table('agreement', ['difference of outputs', 'value#'], rows),
  );
}

function countersSection(record) {
  const counters = named('counters', record.counters);
  if (!counters.length) return null;
  const ratios = DATA.counters[record.counters][2];
  const about = DATA.measures
    .filter((measure) => ratios[measure.name] !== undefined)
    .map((measure) => [measure.title, brief(ratios[measure.name], measure.style), measure.meaning]);
  const rows = counters
    .toSorted(([one], [other]) => inOrder(one, other))
    .map(([name, value]) => [name.replaceAll('_', ' '), plain(value)]);
  return section(
    'counters, exact and repeatable',
    about.length ? table('ratios', ['ratio', 'value#', ''], about) : null,
    el(
      'details',
      { open: true },
      el('summary', {}, plural(rows.length, 'counter')),
      el('div', { class: 'columns' }, table('counters', ['counter', 'value#'], rows, 'list headless')),
    ),
  );
}

// The figures of the newest program: registers, spills and sizes of each kernel, and the digests.
function figuresSection(cell) {
  const [backend, target] = DATA.subjects[cell.subject];
  const found = FIGURES.filter(
    (one) => one.caseIndex === cell.caseIndex && one.backend === backend && one.target === target,
  );
  if (!found.length) return null;
  return section(
    'PTX and SASS',
    [...new Map(found.map((one) => [one.assembler, one])).values()].map((one) => {
      const kernels = one.kernels.map(([name, place]) => [DATA.texts[name], new Map(named('counters', place))]);
      const names = [...new Set(kernels.flatMap(([, numbers]) => [...numbers.keys()]))];
      const rows = kernels.map(([kernel, numbers]) => [kernel, ...names.map((name) => plain(numbers.get(name)))]);
      return [
        table(
          `figures of ${one.assembler}`,
          [`kernel (${one.assembler})*`, ...names.map((name) => `${name.replaceAll('_', ' ')}#`)],
          rows,
        ),
        facts([
          ['PTX sha256', one.program],
          ['cubin sha256', one.cubin],
        ]),
      ];
    }),
  );
}

function linkList(links) {
  return el(
    'p',
    {},
    Object.entries(links).map(([name, url], at) => [at ? ' · ' : '', el('a', { href: url }, name)]),
  );
}

function evidenceSection(record) {
  const found = record.bundle === null ? undefined : DATA.bundles[record.bundle];
  if (!found)
    return record.bundle === null
      ? null
      : section('evidence', el('p', { class: 'muted' }, `${record.bundle} is not on this machine`));
  return section('evidence', linkList(found.links), Object.values(found.maps).map(errorMap));
}

function traceSection(cell, record) {
  const [backend, target] = DATA.subjects[cell.subject];
  const found = DATA.traces[`${DATA.cases[cell.caseIndex]} ${backend} ${target}`];
  if (
    !found &&
    !Object.keys(Object.fromEntries(named('counters', record.counters))).some((name) =>
      name.startsWith('instructions_'),
    )
  )
    return null;
  const command = `megamoe explain ${quoted(DATA.cases[cell.caseIndex])} --backend ${quoted(backend)} --target ${target}`;
  if (found)
    return section(
      'trace of the VM',
      Object.entries(found.pictures).map(([name, source]) => el('img', { src: source, alt: name })),
      linkList(found.links),
      el(
        'p',
        { class: 'muted' },
        'Open *.perfetto.json in ui.perfetto.dev. It shows a VM step as a microsecond, which is no time of a GPU.',
      ),
    );
  return section('trace of the VM', el('div', { class: 'command' }, el('code', {}, command), copyButton(command)));
}

function acceptedSection(cell) {
  const text = `${DATA.cases[cell.caseIndex]} on ${subjectName(cell.subject)}`;
  const found = DATA.acceptances.filter((one) => one.row.startsWith(text));
  return found.length ? section('accepted changes', acceptanceTable(found)) : null;
}

function detailOf(cell) {
  const record = selectedRecord(cell);
  const status = record?.status ?? last([...cell.cold, ...cell.hot]).status;
  const badge = el('span', { class: `badge ${status}` }, `${DATA.signs[status]} ${status.replace('_', ' ')}`);
  const close = el('button', { type: 'button', title: 'Escape', onclick: closeDetail, 'aria-label': 'Close' }, '✕');
  const head = el(
    'header',
    {},
    el('h2', {}, DATA.cases[cell.caseIndex], el('br'), el('small', {}, subjectName(cell.subject))),
    badge,
    close,
  );
  if (!record) return [head, timesSection(cell), figuresSection(cell), historySection(cell, null)];
  return [
    head,
    scheduleChips(cell, record),
    verdictSection(cell, record),
    timesSection(cell),
    metricsSection(record),
    evidenceSection(record),
    agreementSection(cell, record),
    countersSection(record),
    figuresSection(cell),
    historySection(cell, record),
    acceptedSection(cell),
    traceSection(cell, record),
  ];
}

function showDetail() {
  const aside = document.getElementById('detail');
  const cell = state.open === null ? undefined : cells.get(state.open);
  aside.hidden = !cell;
  aside.replaceChildren(...(cell ? detailOf(cell).filter(Boolean) : []));
  if (cell && getComputedStyle(aside.parentElement).flexDirection === 'column') aside.scrollIntoView();
}

// The drawer's sections about time: device times with their samples, and the row's history over the runs.

function timesSection(cell) {
  const found = ['cold', 'hot'].map((name) => last(cell[name])).filter(Boolean);
  if (!found.length) return null;
  const timed = found.filter((timing) => timing.median);
  const failed = found.filter((timing) => !timing.median);
  return section(
    'device time',
    timed.length ? [timesTable(timed), strip(timed)] : null,
    failed.map((timing) =>
      el('p', { class: 'sentence' }, sentenceLines(`${timing.temperature}: ${timing.status}. ${timing.sentence}`)),
    ),
    rivals(cell, timed),
  );
}

function timesTable(timings) {
  const columns = [
    '',
    'median µs#',
    '95% interval#',
    'floor µs#',
    'floor / time#',
    'samples#',
    'launches each#',
    'discarded',
    'ended by',
  ];
  const rows = timings.map((timing) => [
    timing.temperature,
    micro(timing.median),
    `${micro(timing.low)} – ${micro(timing.high)}`,
    floorText(timing),
    timingNumber(timing) === null ? '–' : brief(timingNumber(timing)),
    plain(timing.count),
    plain(timing.launches),
    Object.entries(timing.discarded)
      .map(([why, count]) => `${count} ${why}`)
      .join(', ') || 'none',
    timing.stopped ?? '–',
  ]);
  return table('device times', columns, rows);
}

// Times of the same case by other backends on the same executor.
function rivals(cell, timings) {
  const executor = DATA.subjects[cell.subject][2];
  const temperature = timings[0]?.temperature;
  const others = [...cells.values()].filter(
    (one) =>
      one.caseIndex === cell.caseIndex &&
      DATA.subjects[one.subject][2] === executor &&
      last(one[temperature] ?? [])?.median,
  );
  if (others.length < 2) return null;
  const rows = others
    .map((one) => [one, last(one[temperature])])
    .sort(([, one], [, other]) => one.median - other.median);
  const best = rows[0][1].median;
  return table(
    `the same case, ${temperature}`,
    [`same case, ${temperature}`, 'median µs#', 'of the fastest#', 'floor / time#'],
    rows.map(([one, timing]) => [
      one === cell ? el('b', {}, subjectName(one.subject)) : subjectName(one.subject),
      micro(timing.median),
      `${(timing.median / best).toFixed(2)}×`,
      timingNumber(timing) === null ? '–' : brief(timingNumber(timing)),
    ]),
  );
}

function runLabel(run) {
  const header = DATA.runs[runOrder.get(DATA.run_ids[run])];
  return header ? header.started.slice(0, 16).replace('T', ' ') : DATA.run_ids[run];
}

function runs(lines) {
  return [...new Map(lines.map((line) => [line.run, line])).values()];
}

// For each number with a history: its name, style, and value in each run.
function historySeries(cell, record) {
  const records = record ? runs(cell.schedules.get(record.schedule)) : [];
  const found = [];
  const add = (name, style, lines, value) => {
    const values = lines.map(value).filter((one) => one !== null && one !== undefined);
    if (values.length) found.push({ name, style, values, lines });
  };
  for (const measure of DATA.measures.filter((one) => ['metrics', 'counters'].includes(one.source))) {
    add(measure.title, measure.style, records, (one) => recordNumber(one, measure));
  }
  add('warp instructions', 'whole', records, (one) =>
    named('counters', one.counters)
      .filter(([name]) => name.startsWith('instructions_'))
      .reduce((sum, [, value]) => (sum ?? 0) + value, null),
  );
  for (const name of ['cold', 'hot']) add(`${name} median, µs`, 'number', runs(cell[name]), (one) => one.median);
  return found;
}

function historySection(cell, record) {
  const records = record ? cell.schedules.get(record.schedule) : [];
  const series = historySeries(cell, record);
  const signs = records.map((one) =>
    el(
      'span',
      {
        class: `swatch ${one.status}`,
        title: `${runLabel(one.run)} ${one.status}`,
        role: 'img',
        'aria-label': `${runLabel(one.run)} ${one.status}`,
      },
      DATA.signs[one.status],
    ),
  );
  const told = (value, style) => (style === 'whole' ? plain(value) : brief(value, style));
  const rows = series.map(({ name, style, values }) => [
    name,
    new Set(values).size > 1 ? sparkline(values, `${name} over ${values.length} runs`) : '',
    told(values[0], style),
    told(last(values), style),
    values.every((value) => value === values[0]) ? (values.length > 1 ? 'unchanged' : 'one run') : change(values),
  ]);
  if (!rows.length && !records.length) return null;
  const title = `history${record ? ` under ${DATA.schedules[record.schedule]}` : ''}`;
  return section(
    title,
    records.length ? el('p', { class: 'chips', 'aria-label': 'Verdicts, the oldest first' }, signs) : null,
    rows.length ? table(title, ['', '', 'oldest#', 'newest#', ''], rows) : null,
  );
}

function change(values) {
  const [first, final] = [toNumber(values[0]), toNumber(last(values))];
  if (!first || !Number.isFinite(final / first)) return '';
  const percent = Math.abs(final / first - 1) * 100;
  return `${final >= first ? '+' : '−'}${percent < 10 ? percent.toPrecision(2) : percent.toFixed(0)}%`;
}
