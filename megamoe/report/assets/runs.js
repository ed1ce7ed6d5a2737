'use strict';
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

function acceptanceTable(acceptances) {
  return table(
    'accepted changes',
    ['row*', 'reason', 'accepted', 'revision', 'changes'],
    acceptances.map((one) => [
      one.row,
      one.reason,
      one.accepted,
      revision(one.git_revision),
      Object.entries(one.changes)
        .map(([name, step]) => `${name} ${step}`)
        .join('; '),
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
