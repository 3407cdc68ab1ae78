-- name: sign
-- Tell the triggers who writes, and why.
update dataflow_context set act = :act, who = :who, why = :why, execution = :execution;

-- name: clear
-- The next writer signs for itself.
update dataflow_context set act = '', who = null, why = null, execution = null;
