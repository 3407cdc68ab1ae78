-- Programs of version 3 to 9 work with these tables: what they register has no origin, as if typed by hand.

-- Who declares a dataset or a job: `flow:NAME` or `project:NAME`. One may have several; what was typed by hand has none.
-- `dials`: those that a flow sets, as a JSON list; one that it no longer sets is reset.
create table origin (
    kind text not null, name text not null, origin text not null,
    who text, at text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')), revision text, dials text,
    primary key (kind, name, origin)
);
