-- name: sign
-- Tell the triggers who writes, and why, until the transaction ends.
select set_config('dataflow.who', :who, true), set_config('dataflow.why', :why, true),
       set_config('dataflow.act', :act, true);
