"""Record files shown to a person: one HTML page that needs no network, or tables in a terminal. No policy of the gate.

material = gather(record_files())
page(material, Extras(...)) -> str

`material` reads the files, `measures` lists what a cell can show, `layout` places the cells, `encoding` writes the data
of the page, `page` the page. Style and script are in `assets`, which are package data.

The plots are our own, in assets/plots.js (9 KB). A plotting library would have to be a Python package, since nothing
fetched is in this tree, and be inlined in each page: bokeh.min.js has 1.3 MB and plotly.min.js 4.8 MB, for a page of
1 MB with all its records. The d3 on PyPI is version 3, of 2016. We draw strips of samples, sparklines,
intervals, error maps and one roofline, with marks that open their row, colours from the style of the page, in light and
in dark, and no style element, which the security policy of the page forbids.
"""
