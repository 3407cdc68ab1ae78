-- name: sign
-- Tell the triggers who writes, and why, until the transaction ends. A transaction that settles work soon gives up on
-- a row that a person keeps locked, and tries again: otherwise the person could become the victim of a deadlock.
select set_config('lock_timeout', case when :act = 'finish' then '200ms' else current_setting('lock_timeout') end, true),
       set_config('dataflow.who', :who, true), set_config('dataflow.why', :why, true),
       set_config('dataflow.act', :act, true), set_config('dataflow.execution', :execution, true);
