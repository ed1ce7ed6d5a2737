'use strict';
// What the VM implements of the PTX ISA, by family, and what witnesses each form.

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
