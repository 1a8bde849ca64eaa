// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state machine of queue pairs: which change of state is allowed, and with which attributes (InfiniBand
//! architecture specification, volume 1, 11.2.5.2; specification: "Queue pair states").
use virtio_rdma_spec::verbs::qp_attr::{
    ACCESS_FLAGS, AV, CUR_STATE, DEST_QPN, EN_SQD_ASYNC_NOTIFY, MAX_DEST_RD_ATOMIC,
    MAX_QP_RD_ATOMIC, MIN_RNR_TIMER, PATH_MTU, PKEY_INDEX, PORT, QKEY, RETRY_CNT, RNR_RETRY,
    RQ_PSN, SQ_PSN, STATE, TIMEOUT,
};
use virtio_rdma_spec::verbs::qp_state::{ERR, INIT, RESET, RTR, RTS, SQD, SQE};

use super::Error;

/// Required and optional attributes (beside STATE) of a change from `current` to `next` of an RC queue pair; `None` where
/// there is no such change.
#[must_use]
pub fn rc_attributes(current: u8, next: u8) -> Option<(u32, u32)> {
    Some(match (current, next) {
        (RESET | INIT | RTR | RTS | SQD | SQE | ERR, RESET) => (0, 0),
        (INIT | RTR | RTS | SQD | SQE | ERR, ERR) => (0, 0),
        (RESET, INIT) => (PKEY_INDEX | PORT | ACCESS_FLAGS, 0),
        (INIT, INIT) => (0, PKEY_INDEX | PORT | ACCESS_FLAGS),
        (INIT, RTR) => (
            AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER,
            ACCESS_FLAGS | PKEY_INDEX,
        ),
        (RTR, RTS) => (
            TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_QP_RD_ATOMIC,
            CUR_STATE | ACCESS_FLAGS | MIN_RNR_TIMER,
        ),
        (RTS, RTS) | (SQD, RTS) => (0, CUR_STATE | ACCESS_FLAGS | MIN_RNR_TIMER),
        (RTS, SQD) => (0, EN_SQD_ASYNC_NOTIFY),
        (SQD, SQD) => (
            0,
            PORT | AV
                | TIMEOUT
                | RETRY_CNT
                | RNR_RETRY
                | MAX_QP_RD_ATOMIC
                | MAX_DEST_RD_ATOMIC
                | ACCESS_FLAGS
                | PKEY_INDEX
                | MIN_RNR_TIMER,
        ),
        _ => return None,
    })
}

/// Checks a change of an RC queue pair from `current` to `next` with the attributes `mask`.
///
/// # Errors
/// [`Error::NotSupported`] for attributes that the device does not have, [`Error::Invalid`] for a change that is not
/// allowed, misses a required attribute, or carries one that it must not.
pub fn check_rc(current: u8, next: u8, mask: u32) -> Result<(), Error> {
    const SUPPORTED: u32 = STATE
        | CUR_STATE
        | EN_SQD_ASYNC_NOTIFY
        | ACCESS_FLAGS
        | PKEY_INDEX
        | PORT
        | QKEY
        | AV
        | PATH_MTU
        | TIMEOUT
        | RETRY_CNT
        | RNR_RETRY
        | RQ_PSN
        | MAX_QP_RD_ATOMIC
        | MIN_RNR_TIMER
        | SQ_PSN
        | MAX_DEST_RD_ATOMIC
        | DEST_QPN;
    let (required, optional) = rc_attributes(current, next).ok_or(Error::Invalid)?;
    let known: u32 = virtio_rdma_spec::verbs::qp_attr::ALL
        .iter()
        .fold(0, |all, (_, bit)| all | *bit as u32);
    if mask & !known != 0 {
        return Err(Error::Invalid);
    }
    if mask & !SUPPORTED != 0 {
        return Err(Error::NotSupported);
    }
    if mask & required != required || mask & !(required | optional | STATE) != 0 {
        return Err(Error::Invalid);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_to_rts_needs_every_required_attribute() {
        for (current, next) in [(RESET, INIT), (INIT, RTR), (RTR, RTS)] {
            let (required, _) = rc_attributes(current, next).unwrap();
            assert_eq!(check_rc(current, next, STATE | required), Ok(()));
            for bit in (0..32).map(|b| 1u32 << b).filter(|b| required & b != 0) {
                assert_eq!(
                    check_rc(current, next, STATE | (required & !bit)),
                    Err(Error::Invalid)
                );
            }
        }
    }

    #[test]
    fn every_pair_of_states_is_allowed_or_refused_as_the_table_says() {
        let all = [RESET, INIT, RTR, RTS, SQD, SQE, ERR];
        let allowed = [
            (RESET, RESET),
            (RESET, INIT),
            (INIT, RESET),
            (INIT, INIT),
            (INIT, RTR),
            (INIT, ERR),
            (RTR, RESET),
            (RTR, RTS),
            (RTR, ERR),
            (RTS, RESET),
            (RTS, RTS),
            (RTS, SQD),
            (RTS, ERR),
            (SQD, RESET),
            (SQD, RTS),
            (SQD, SQD),
            (SQD, ERR),
            (SQE, RESET),
            (SQE, ERR),
            (ERR, RESET),
            (ERR, ERR),
        ];
        for current in all {
            for next in all {
                assert_eq!(
                    rc_attributes(current, next).is_some(),
                    allowed.contains(&(current, next)),
                    "{current} {next}"
                );
            }
        }
        assert_eq!(rc_attributes(9, RESET), None);
    }
}
