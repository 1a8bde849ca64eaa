// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An interface that is prepared as root for a process that starts without privileges, in network and
//! mount namespaces of their own.
use std::process::Command;

use crate::common::is_root;

/// Ends at the first step that is not as it should be, and says which.
const STEPS: &str = r#"
set -eux
trap 'kill $! 2>/dev/null || :' EXIT
mount -t tmpfs none "$DIRECTORY"
cd "$DIRECTORY"
chmod 755 .
# Hosts have it for all users; containers may not.
mount -t tmpfs none /dev/net
mknod -m 666 /dev/net/tun c 10 200
mkdir pins sockets
mount -t bpf bpf pins
chown 65534 sockets
cp "$DEVICE" device
ip link set lo up
ip tuntap add dev vm1 mode tap vnet_hdr
ip link set vm1 up
tap=rdma-$(ip -o link show vm1 | cut -d: -f1)
fails() {
    if "$@"; then exit 1; fi
}

fails ./device wire-setup vm1
fails ./device wire-setup no-such-one --user 65534 --pins pins
./device wire-setup vm1 --user 65534 --pins pins
# It may be prepared anew.
./device wire-setup vm1 --user 65534 --pins pins
test -e pins/$tap-to-device
ip link show $tap up

cat >config <<END
status-socket = "$DIRECTORY/sockets/status"
[[device]]
socket = "$DIRECTORY/sockets/vm1"
mac = "52:54:00:12:34:01"
netdev = "vm1"
END
# It is nobody else's.
chown 65533 sockets
fails setpriv --reuid 65533 --regid 65533 --clear-groups ./device --config config
chown 65534 sockets
setpriv --reuid 65534 --regid 65534 --clear-groups ./device --config config &
for i in $(seq 100); do
    ./device status sockets/status && break
    sleep 0.1
done
./device status sockets/status
fails ./device wire-setup vm1 --remove --pins pins
kill $!
wait $!
./device wire-setup vm1 --remove --pins pins
test ! -e pins/$tap-to-device
fails ip link show $tap
# There is nothing to take back.
./device wire-setup vm1 --remove --pins pins
"#;

#[test]
fn an_interface_is_prepared_for_a_process_without_privileges() {
    if !is_root() {
        return;
    }
    let directory = std::env::temp_dir().join(format!("wire-setup-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let ran = Command::new("unshare")
        .args(["--net", "--mount", "timeout", "60", "sh", "-c", STEPS])
        .env("DIRECTORY", &directory)
        .env("DEVICE", env!("CARGO_BIN_EXE_vhost-device-rdma"))
        .output()
        .unwrap();
    let _ = std::fs::remove_dir(&directory);
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}");
}
