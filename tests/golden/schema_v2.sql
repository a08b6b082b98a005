-- Schema 2 of a pidurable store: one session in one file.
--
-- Every table is STRICT and keyed by the session-wide integer id, which is the rowid, so that
-- appending is cheap. An index exists only where a read of the contract needs it: each one makes a
-- commit about 1.2 times as dear. What a step changes (checkpoint, wait) lies apart from what stays
-- (input), so a commit writes what changed. Foreign keys are declared on cold tables only, and are
-- deferred to the end of the batch.

-- The one row that every batch updates, and compares its epoch with.
create table session (
  id integer primary key check (id = 1),
  uuid text not null,
  created_us integer not null,
  epoch integer not null,
  seq integer not null,
  next_id integer not null,
  clean integer not null
) strict;

-- Who holds the session: replaced as a whole, never edited, but for the mark that it was given up.
create table holder (
  id integer primary key check (id = 1),
  epoch integer not null,
  holder_id text not null,
  host text not null,
  pid integer not null,
  started_us integer not null,
  lock_file text,
  store_uuid text not null,
  inode integer not null,
  released integer not null
) strict;

create table heartbeat (
  id integer primary key check (id = 1),
  epoch integer not null,
  at_us integer not null
) strict;

create table conversations (
  id integer primary key,
  uuid text not null,
  parent integer references conversations (id) deferrable initially deferred,
  parent_entry integer,
  owner integer,
  key text,
  principal text not null,
  created_us integer not null
) strict;

-- Also finds the ownerless ones, so it is not partial.
create index conversations_owner
  on conversations (owner);

-- No id is 0, so it stands for "no owner": SQLite takes nulls for distinct.
create unique index conversations_key
  on conversations (coalesce(owner, 0), key)
  where key is not null;

create table entries (
  id integer primary key,
  conversation integer not null,
  seq integer not null,
  kind text not null,
  by_task integer,
  head integer,
  edits text,
  messages text,
  data text,
  at_us integer not null
) strict;

create index entries_conversation
  on entries (conversation);

create index entries_head
  on entries (conversation)
  where head is not null;

create table tasks (
  id integer primary key,
  conversation integer not null,
  kind text not null,
  version integer not null,
  owner integer,
  key text,
  background integer not null,
  on_restart text,
  deadline_us integer,
  created_us integer not null,
  status integer not null,
  started_us integer,
  ended_us integer,
  abort_us integer,
  abort_reason text,
  invocations integer not null,
  recoveries integer not null,
  tries integer not null,
  ready_us integer not null,
  woken_by text,
  blocked text,
  outcome_status text
) strict;

create index tasks_live
  on tasks (id)
  where status < 4;

create index tasks_conversation
  on tasks (conversation);

create unique index tasks_owner_key
  on tasks (owner, key)
  where key is not null and owner is not null;

create unique index tasks_conversation_key
  on tasks (conversation, key)
  where key is not null and owner is null;

create table inputs (
  task integer primary key,
  value text not null
) strict;

create table checkpoints (
  task integer primary key,
  phase text not null,
  value text not null,
  at_us integer not null
) strict;

create table waits (
  task integer primary key,
  value text not null
) strict;

create table outcomes (
  task integer primary key,
  value text not null
) strict;

create table memos (
  task integer not null,
  name text not null,
  value text not null,
  primary key (task, name)
) strict, without rowid;

create table signals (
  id integer primary key,
  task integer not null,
  name text not null,
  key text,
  payload text not null,
  at_us integer not null,
  read integer not null default 0
) strict;

-- One that was read stays until its task ends if it has a key, so that sending it again is noticed.
create index signals_task
  on signals (task, read);

create unique index signals_key
  on signals (task, key)
  where key is not null;

create table submissions (
  id integer primary key,
  conversation integer not null references conversations (id) deferrable initially deferred,
  kind text not null,
  when_busy text not null,
  request_id text,
  digest text not null,
  content text not null,
  created_us integer not null,
  status text not null,
  entry integer,
  run integer,
  answer integer,
  reason text,
  detail text,
  ended_us integer
) strict;

create unique index submissions_request
  on submissions (conversation, request_id)
  where request_id is not null;

create index submissions_open
  on submissions (conversation)
  where status in ('queued', 'placed');

create table documents (
  id integer primary key,
  name text not null,
  scope integer not null,
  scope_id integer not null,
  key text not null,
  history text not null,
  fork text not null,
  created_seq integer not null,
  retired_seq integer
) strict;

-- One index serves the address and the scope: the columns of the scope come first.
create unique index documents_living
  on documents (scope, scope_id, name, key)
  where retired_seq is null;

-- What stood at an address in the past. Only conversations are forked and rewound, so that the
-- documents of tasks, of which there are many, do not pay for it.
create unique index documents_past
  on documents (scope_id, name, key, created_seq)
  where scope = 1;

-- What a fork may have to look back for: a family of others may be large.
create index documents_rewindable
  on documents (scope_id, name, key)
  where scope = 1 and history = 'rewindable';

create table revisions (
  document integer not null,
  seq integer not null,
  base integer not null,
  version integer not null,
  value text not null,
  primary key (document, seq)
) strict, without rowid;

create table blobs (
  sha256 text primary key,
  bytes blob not null
) strict;
