// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `verbs`: tests of ours against the public verbs API (`ci/verbs/`), of what rdma-core's own
//! suite leaves out.

use std::time::Duration;

use anyhow::{bail, Result};

use super::tools::{counts, settled, Pair};
use super::{Case, Fixture, Lane, Skip};
use crate::images::{Image, Kernel};
use crate::vm::{FrontEnd, Hosts};

/// Longer than any of the tests takes before it ends itself.
const LONG: Duration = Duration::from_secs(400);

/// The lane.
pub fn lane() -> Lane {
    let runs = || {
        Kernel::STABLE
            .iter()
            .map(|kernel| (*kernel, [ALONE, APART].concat()))
            .collect()
    };
    Lane {
        name: "verbs",
        about: "the public verbs API, beyond rdma-core's own tests",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Plain,
        runs,
    }
}

/// A case for each test in one VM, and for those of two processes one between two VMs.
macro_rules! tests {
    ([$($alone:literal)*] [$($two:literal)*]) => {
        const ALONE: &[Case] = &[
            $(Case { name: $alone, run: |fixture| alone(fixture, $alone) },)*
            $(Case { name: $two, run: |fixture| alone(fixture, $two) },)*
        ];
        const APART: &[Case] = &[
            $(Case { name: concat!($two, " between two VMs"), run: |fixture| apart(fixture, $two) },)*
        ];
    };
}

tests! {
    [
        "atomic_against_processors"
        "atomic_lock_shared_with_processors"
        "atomic_scattered_result"
        "masked_compare_and_swap"
        "masked_fetch_and_add"
        "masked_errors"
        "srd_all_operations"
        "srd_errors_are_of_their_message"
        "srd_keys_are_of_their_domain"
        "srd_many_to_one"
        "srd_without_receive_is_overtaken"
        "atomic_write"
        "atomic_write_access"
        "flush_global"
        "flush_without_right"
        "flush_out_of_range"
        "flush_persistent_is_refused"
        "cq_bad_parameters"
        "cq_max_size"
        "cq_resize_with_entries"
        "cq_resize_under_load"
        "cq_overflow"
        "cq_exactly_full"
        "cq_moderation"
        "cq_channel_of_many"
        "cq_after_destroyed_qp"
        "cq_ex_fields_rc"
        "cq_ex_fields_ud"
        "cq_ex_timestamps"
        "cq_ex_wallclock"
        "cq_ex_resize_keeps_timestamps"
        "cq_rt_values_bad_mask"
        "cq_threads"
        "err_loc_len_too_long_message"
        "err_loc_len_receive_too_short"
        "err_too_many_sges"
        "err_loc_qp_op_rd_atomic"
        "err_loc_prot_unknown_lkey"
        "err_loc_prot_of_other_pd"
        "err_loc_prot_out_of_range"
        "err_loc_prot_before_start"
        "err_loc_prot_wrapping_range"
        "err_loc_prot_read_into_read_only"
        "err_rem_op_bad_receive_key"
        "err_rem_op_receive_into_read_only"
        "err_rem_access_unknown_rkey"
        "err_rem_access_of_other_pd"
        "err_rem_access_out_of_range"
        "err_rem_access_write_right"
        "err_rem_access_read_right"
        "err_rem_access_atomic_right"
        "err_rem_inv_req_atomic_alignment"
        "err_rem_inv_req_no_dest_rd_atomic"
        "err_atomic_length"
        "err_retry_exc"
        "err_retry_exc_not_connected"
        "err_rnr_retry_exc"
        "err_rnr_without_limit"
        "err_flush_by_state"
        "err_reset_forgets"
        "err_harms_no_other"
        "err_rem_access_wrapping_range"
        "err_guessed_keys"
        "null_mr_send_and_receive"
        "null_mr_rdma"
        "null_mr_is_not_remote"
        "mr_zero_based"
        "mr_iova"
        "mr_unaligned"
        "mr_of_read_only_memory"
        "mr_bad_parameters"
        "mr_key_after_dereg"
        "rereg_mr_access"
        "rereg_mr_translation"
        "rereg_mr_pd"
        "rereg_mr_all_and_errors"
        "rereg_mr_under_traffic"
        "dereg_mr_under_traffic"
        "dm_copy"
        "dm_rdma_and_atomics"
        "dm_bad_parameters"
        "dm_is_clean_and_comes_back"
        "import_by_other_process"
        "import_bad_handles"
        "mw1_bind_and_use"
        "mw1_rebind_and_unbind"
        "mw1_access"
        "mw1_of_other_domain"
        "mw_bind_errors"
        "mw_bind_mr_of_other_domain"
        "mw_holds_its_region"
        "mw2_bind_use_invalidate"
        "mw2_bind_use_invalidate_ex"
        "mw2_bind_twice"
        "mw2_through_other_qp"
        "mw2_zero_based"
        "mw_bad_invalidation"
        "mw_bad_remote_invalidation"
        "mw2_fenced_invalidation"
        "mw2_invalidation_under_traffic"
        "mw_bad_parameters"
        "mw_is_no_lkey"
        "mw2_without_its_qp"
        "post_all_operations"
        "post_all_operations_ex"
        "inline_up_to_the_limit"
        "inline_is_granted_unasked"
        "inline_read_is_refused"
        "fence_after_read"
        "solicited_events"
        "notify_any"
        "selective_signaling"
        "full_send_queue"
        "full_receive_queue"
        "sq_sig_all"
        "post_list_up_to_bad"
        "ex_abort_and_error"
        "ex_ops_by_type"
        "post_in_wrong_state"
        "large_messages"
        "post_max_sge"
        "fork_while_in_use"
        "fork_child_with_own_device"
        "death_in_mid_traffic"
        "unmapped_region_stays_pinned"
        "process_foreign_handles"
        "process_foreign_mappings"
        "process_foreign_memory"
        "process_fresh_doorbells_are_zero"
        "limit_pd"
        "limit_cq"
        "limit_qp"
        "limit_mr"
        "limit_mw"
        "limit_srq"
        "limit_ah"
        "limit_xrcd"
        "limit_qp_size"
        "limit_mcast_attach"
        "parent_domain"
        "gid_change"
        "device_attributes"
        "data_in_order"
        "unsupported_is_said"
        "srq_shared_by_two"
        "srq_limit_event"
        "srq_resize"
        "srq_full"
        "srq_bad_parameters"
        "srq_last_wqe_reached"
        "srq_keys_are_of_its_pd"
        "srq_rnr"
        "srq_uc"
        "srq_ud"
        "state_illegal_changes"
        "state_query_returns_what_was_set"
        "state_comm_est"
        "state_sqd_drained_event"
        "state_sqd_without_event"
        "state_sqe_uc"
        "state_sqe_ud"
        "state_path_migration_refused"
        "state_peer_ready_later"
        "state_self_connected"
        "state_access_change_in_rts"
        "uc_send"
        "uc_write"
        "uc_write_with_imm"
        "uc_loss_without_receive"
        "uc_write_without_right"
        "uc_refuses_read_and_atomics"
        "uc_receive_too_short"
        "uc_many_in_order"
        "ud_send_with_header"
        "ud_answer_by_header"
        "ud_ipv6_header"
        "ud_sl_tells_the_header"
        "ud_length_limits"
        "ud_without_receive_is_lost"
        "ud_gather_inline_ex"
        "ud_other_qkey_is_dropped"
        "ud_qkey_change"
        "ud_privileged_qkey_of_work_request"
        "ud_privileged_qkey_needs_capability"
        "mcast_attach_and_detach"
        "mcast_bad_parameters"
        "mcast_destroy_while_attached"
        "mcast_loopback"
        "mcast_loopback_blocked"
        "mcast_loopback_blocked_still_receives"
        "mcast_block_flag_is_for_ud"
        "xrc_all_operations"
        "xrc_all_operations_ex"
        "xrc_unknown_srq"
        "xrc_srq_of_other_domain"
        "xrc_rnr"
        "xrc_srq_limit"
        "xrc_bad_parameters"
        "xrc_domain_by_file"
        "xrc_target_opened_by_other_process"
        "xrc_open_unknown_qp"
    ]
    [
        "srd_two_ping_pong"
        "srd_two_rdma"
        "srd_two_incast"
        "srd_two_all_to_all"
        "two_rc_send"
        "two_uc_send"
        "two_rc_rdma"
        "two_uc_write"
        "two_rc_bidirectional"
        "two_rc_events"
        "two_xrc"
        "two_rc_poll_on_memory"
        "two_rc_peer_goes_away"
        "two_ud"
        "two_mcast_loopback_blocked"
    ]
}

/// Runs a test in one VM.
pub fn alone(fixture: &mut Fixture, test: &str) -> Result<()> {
    let before = counts(&fixture.bed)?;
    let output = fixture
        .vm(1)?
        .run(&format!("/payload/verbs-test {test}"), LONG)?;
    judge(test, output.status, &output.text)?;
    settled(&fixture.bed, &before)
}

/// Runs a test between two VMs.
pub fn apart(fixture: &mut Fixture, test: &str) -> Result<()> {
    let before = counts(&fixture.bed)?;
    let pair = Pair {
        server: 2,
        client: 1,
        port: fixture.port(),
    };
    let server = format!("/payload/verbs-test --server {}", pair.port);
    let client = format!(
        "/payload/verbs-test --peer {}:{} {test}",
        pair.host(),
        pair.port
    );
    let (text, _) = pair.run(&fixture.bed, &server, &client, LONG)?;
    judge(test, 0, &text)?;
    settled(&fixture.bed, &before)
}

/// What the line of a test says.
fn judge(test: &str, status: i32, text: &str) -> Result<()> {
    let said = text
        .lines()
        .find_map(|line| line.strip_prefix(test)?.strip_prefix(": "))
        .unwrap_or_default();
    if let Some(reason) = said.strip_prefix("skip ") {
        bail!(Skip(reason.to_owned()));
    }
    if status != 0 || !said.starts_with("ok") {
        bail!("ended with {status}:\n{text}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use super::*;
    use crate::shell;

    /// The names in `ci/verbs/` that stand after one of these macros.
    fn defined(macros: &[&str]) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(shell::root().join("ci/verbs")).expect("ci/verbs") {
            let path = entry.expect("an entry").path();
            if path.extension().is_none_or(|extension| extension != "c") {
                continue;
            }
            let text = fs::read_to_string(path).expect("a source");
            for line in text.lines() {
                let name = macros.iter().find_map(|start| line.strip_prefix(start));
                names.extend(name.and_then(|rest| Some(rest.split([',', ')']).next()?.to_owned())));
            }
        }
        names
    }

    fn names(cases: &[Case]) -> Vec<String> {
        cases.iter().map(|case| case.name.to_owned()).collect()
    }

    #[test]
    fn every_test_has_its_cases() {
        let all = names(ALONE);
        assert_eq!(
            all.iter().cloned().collect::<BTreeSet<_>>(),
            defined(&["TEST(", "LONG_TEST(", "SIDES("])
        );
        assert_eq!(all.len(), defined(&["TEST(", "LONG_TEST(", "SIDES("]).len());
        let two: BTreeSet<_> = defined(&["SIDES("])
            .iter()
            .map(|name| format!("{name} between two VMs"))
            .collect();
        assert_eq!(names(APART).into_iter().collect::<BTreeSet<_>>(), two);
    }

    #[test]
    fn outcomes_are_read() {
        assert!(judge("a", 0, "a: ok (0.1 s)\n").is_ok());
        let skip = judge("a", 0, "a: skip why (0.1 s)\n").expect_err("a skip");
        assert_eq!(
            skip.downcast_ref::<Skip>().expect("a skip").0,
            "why (0.1 s)"
        );
        for (status, text) in [(1, "a: FAIL x\n"), (1, "a: ok\n"), (0, "b: ok\n"), (0, "")] {
            let error = judge("a", status, text).expect_err("a failure");
            assert!(error.downcast_ref::<Skip>().is_none());
        }
    }
}
