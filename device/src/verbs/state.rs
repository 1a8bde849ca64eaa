// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state machine of queue pairs: which change of state is allowed, and with which attributes
//! (InfiniBand architecture specification, volume 1, 11.2.5.2; specification: "Queue pair states").
use virtio_rdma_spec::facts::QpType;
use virtio_rdma_spec::verbs::qp_attr::{
    self, ACCESS_FLAGS, AV, CUR_STATE, DEST_QPN, EN_SQD_ASYNC_NOTIFY, MAX_DEST_RD_ATOMIC,
    MAX_QP_RD_ATOMIC, MIN_RNR_TIMER, PATH_MTU, PKEY_INDEX, PORT, QKEY, RETRY_CNT, RNR_RETRY,
    RQ_PSN, SQ_PSN, STATE, TIMEOUT,
};
use virtio_rdma_spec::verbs::qp_state::{ERR, INIT, RESET, RTR, RTS, SQD, SQE};
use virtio_rdma_spec::verbs::qp_type;

use super::Error;

/// Attributes whose change needs a pause of the send queue.
const SQD_RC: u32 = PORT
    | AV
    | TIMEOUT
    | RETRY_CNT
    | RNR_RETRY
    | MAX_QP_RD_ATOMIC
    | MAX_DEST_RD_ATOMIC
    | ACCESS_FLAGS
    | PKEY_INDEX
    | MIN_RNR_TIMER;

/// Required and optional attributes (beside STATE) of a change from `current` to `next` of a queue
/// pair of type `kind`; `None` where there is no such change.
#[must_use]
pub fn attributes(kind: u8, current: u8, next: u8) -> Option<(u32, u32)> {
    let QpType {
        datagram,
        acknowledged,
        ..
    } = *QpType::of(kind)?;
    match (current, next) {
        (RESET | INIT | RTR | RTS | SQD | ERR, RESET) | (INIT | RTR | RTS | SQD | ERR, ERR) => {
            return Some((0, 0));
        }
        // Only queue pairs without acknowledgements can lose their send queue alone.
        (SQE, RESET | ERR) if !acknowledged => return Some((0, 0)),
        (RTS, SQD) => return Some((0, EN_SQD_ASYNC_NOTIFY)),
        _ => {}
    }
    if datagram {
        let port = if kind == qp_type::GSI { 0 } else { PORT };
        let (timer, retry) = if acknowledged {
            (MIN_RNR_TIMER, RNR_RETRY)
        } else {
            (0, 0)
        };
        return Some(match (current, next) {
            (RESET, INIT) => (PKEY_INDEX | QKEY | port, PORT & !port),
            (INIT, INIT) => (0, PKEY_INDEX | QKEY | PORT),
            (INIT, RTR) => (0, PKEY_INDEX | QKEY | timer),
            (RTR, RTS) => (SQ_PSN, CUR_STATE | QKEY | timer | retry),
            (SQE, RTS) if acknowledged => return None,
            (RTS, RTS) | (SQD, RTS) | (SQE, RTS) => (0, CUR_STATE | QKEY | timer),
            (SQD, SQD) => (0, PKEY_INDEX | QKEY),
            _ => return None,
        });
    }
    if kind == qp_type::IWARP {
        // From INIT the device takes it to RTS when its connection is there.
        return Some(match (current, next) {
            (RESET | INIT, INIT) => (0, PKEY_INDEX | PORT | ACCESS_FLAGS),
            (RTS, RTS) => (0, CUR_STATE | ACCESS_FLAGS),
            // It closes already, or has.
            (SQD, SQD) | (ERR, SQD) => (0, EN_SQD_ASYNC_NOTIFY),
            _ => return None,
        });
    }
    let path = AV | PATH_MTU | DEST_QPN | RQ_PSN;
    let responder = MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER;
    let requester = RETRY_CNT | RNR_RETRY | MAX_QP_RD_ATOMIC;
    // What each type has of them.
    let (responder, timeout, requester) = match kind {
        qp_type::RC => (responder, TIMEOUT, requester),
        qp_type::XRC_INI => (0, TIMEOUT, requester),
        qp_type::XRC_TGT => (responder, TIMEOUT, 0),
        qp_type::UC => (0, 0, 0),
        _ => return None,
    };
    let rnr_timer = responder & MIN_RNR_TIMER;
    Some(match (current, next) {
        (RESET, INIT) => (PKEY_INDEX | PORT | ACCESS_FLAGS, 0),
        (INIT, INIT) => (0, PKEY_INDEX | PORT | ACCESS_FLAGS),
        (INIT, RTR) => (path | responder, ACCESS_FLAGS | PKEY_INDEX),
        (RTR, RTS) => (
            SQ_PSN | timeout | requester,
            CUR_STATE | ACCESS_FLAGS | rnr_timer,
        ),
        (RTS, RTS) | (SQD, RTS) => (0, CUR_STATE | ACCESS_FLAGS | rnr_timer),
        (SQE, RTS) if !acknowledged => (0, CUR_STATE | ACCESS_FLAGS),
        (SQD, SQD) => {
            let common = PORT | AV | ACCESS_FLAGS | PKEY_INDEX;
            (0, SQD_RC & (common | responder | timeout | requester))
        }
        _ => return None,
    })
}

/// Checks a change of a queue pair of type `kind` from `current` to `next` with the attributes
/// `mask`.
///
/// # Errors
/// [`Error::NotSupported`] for attributes that the device does not have, [`Error::Invalid`] for a
/// change that is not allowed, misses a required attribute, or carries one that it must not.
pub fn check(kind: u8, current: u8, next: u8, mask: u32) -> Result<(), Error> {
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
    let (required, optional) = attributes(kind, current, next).ok_or(Error::Invalid)?;
    let known: u32 = qp_attr::ALL
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
            let (required, _) = attributes(qp_type::RC, current, next).unwrap();
            assert_eq!(check(qp_type::RC, current, next, STATE | required), Ok(()));
            for bit in (0..32).map(|b| 1u32 << b).filter(|b| required & b != 0) {
                assert_eq!(
                    check(qp_type::RC, current, next, STATE | (required & !bit)),
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
            (ERR, RESET),
            (ERR, ERR),
        ];
        for current in all {
            for next in all {
                assert_eq!(
                    attributes(qp_type::RC, current, next).is_some(),
                    allowed.contains(&(current, next)),
                    "{current} {next}"
                );
            }
        }
        assert_eq!(attributes(qp_type::RC, 9, RESET), None);
    }
}
