// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Objects that the operator puts in error.
use std::process::Command;
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::spec::event::event_type;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{qp_state, send_flag, wc_status, wr_opcode};
use vhost_device_rdma_bare::DeviceProcess;

use crate::common::{assert_event, assert_no_event, assert_status, assert_works, Two};

/// Runs `fail` for the first VM; returns what it says against it, or nothing.
fn fail(process: &DeviceProcess, what: &str, number: u32) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_vhost-device-rdma"))
        .arg("fail")
        .arg(process.status_socket())
        .arg(process.socket(0))
        .args([what, &number.to_string()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.success(), said.is_empty());
    said
}

#[test]
fn the_operator_puts_a_queue_pair_in_error() {
    let two = Two::new();
    let (pair, other) = (two.pair(), two.pair());
    assert_works(&pair);
    pair.a.qp.post_recv(7, &[pair.a.mr.sge(0, 8)]).unwrap();
    let number = pair.a.qp.number();
    assert_eq!(fail(&two.process, "qp", number), "");
    assert_event(&two.a, event_type::QP_FATAL, number);
    assert_status(&pair.a.received(), wc_status::WR_FLUSH_ERR);
    assert_eq!(pair.a.qp.state().unwrap(), qp_state::ERR);
    // Once; others go on.
    let said = fail(&two.process, "qp", number);
    assert!(
        said.contains(&format!("has no qp {number} in use")),
        "{said}"
    );
    assert_no_event(&two.a);
    assert_works(&other);
    let said = fail(&two.process, "qp", 0xff_fffe);
    assert!(said.contains("has no qp 16777214 in use"), "{said}");
}

#[test]
fn the_operator_puts_a_completion_queue_in_error() {
    let two = Two::new();
    let (pair, other) = (two.pair(), two.pair());
    assert_works(&pair);
    let number = pair.a.send_cq.number();
    assert_eq!(fail(&two.process, "cq", number), "");
    assert_event(&two.a, event_type::CQ_ERR, number);
    // Nothing completes there any longer, and its queue pairs are in error.
    assert_eq!(pair.a.qp.state().unwrap(), qp_state::ERR);
    let wqe = SendWqe {
        opcode: wr_opcode::SEND,
        flags: send_flag::SIGNALED,
        ..SendWqe::default()
    };
    pair.a.qp.post_send(&wqe, &[]).unwrap();
    assert!(pair.a.send_cq.poll().is_none());
    let said = fail(&two.process, "cq", number);
    assert!(said.contains("in use"), "{said}");
    assert_works(&other);
}

#[test]
fn a_file_says_what_happens_when() {
    let two = Two::new();
    let pair = two.pair();
    let name = two.process.socket(0).display();
    let file = std::env::temp_dir().join(format!("play-{}.toml", std::process::id()));
    let number = pair.a.qp.number();
    let text = format!(
        "[[step]]\nat = '200ms'\ndevice = '{name}'\nqp = {number}\n\
         [[step]]\nat = '0s'\ndevice = '{name}'\nlink = 'down'\n\
         [[step]]\nat = '100ms'\ndevice = '{name}'\nlink = 'up'\n\
         [[step]]\nat = '300ms'\ndevice = '{name}'\nfaults = 'loss=1%'\n"
    );
    std::fs::write(&file, text).unwrap();
    let start = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_vhost-device-rdma"))
        .arg("play")
        .args([two.process.status_socket(), file.clone()])
        .output()
        .unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(300));
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let steps: Vec<_> = told
        .lines()
        .filter_map(|line| line.split_once(": step ")?.1.split(' ').next())
        .collect();
    assert_eq!(steps, ["2", "3", "1"]);
    for event in [event_type::PORT_ERR, event_type::PORT_ACTIVE] {
        assert_event(&two.a, event, 1);
    }
    assert_event(&two.a, event_type::QP_FATAL, number);
    // What the process refuses ends it.
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("step 4: only frames have faults"), "{said}");
}

#[test]
fn what_cannot_fail_is_told() {
    let two = Two::new();
    let name = two.process.socket(0).display();
    for (request, answer) in [
        ("fail x qp 5\n".to_owned(), "there is no device 'x'"),
        (
            format!("fail {name} srq 5\n"),
            "a qp or a cq fails, not a 'srq'",
        ),
        (format!("fail {name} qp five\n"), "'five' is not a number"),
        ("fail qp\n".to_owned(), "the request is: fail DEVICE"),
    ] {
        let said = two.process.request(request.as_bytes()).unwrap();
        assert!(said.to_string().contains(answer), "{said}");
    }
}
