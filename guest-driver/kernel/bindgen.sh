#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
#
# bindgen.sh FLAGS_FILE HEADER OUT_DIR
#
# Writes OUT_DIR/bindings.rs, and OUT_DIR/layout.h: what clang thinks of the layout of the structures, as assertions
# for the compiler that builds the kernel.
set -eu
flags_file=$1 header=$2 out=$3

# Of kbuild's flags those that say what the headers mean; clang does not know many of the others.
flags=
take=
for flag in $(cat "$flags_file"); do
    if [ -n "$take" ]; then
        flags="$flags $take $flag"
        take=
        continue
    fi
    case $flag in
    -include | -isystem | -I | -D | -U) take=$flag ;;
    -DKBUILD_* | -D__KBUILD_*) ;;
    -I* | -D* | -U* | -std=* | -nostdinc | -fshort-wchar | -funsigned-char | -fms-extensions | -fno-builtin | -m64) flags="$flags $flag" ;;
    esac
done

types='ib_device|ib_device_ops|ib_cq|ib_qp|ib_pd|ib_mr|ib_ucontext|ib_event|ib_gid_attr|ib_device_attr|ib_port_attr'
types="$types|ib_mw|ib_srq|ib_srq_init_attr|ib_srq_attr|ib_xrcd|ib_dm|ib_dm_alloc_attr|ib_dm_mr_attr|rdma_hw_stats"
types="$types|ib_ah|ib_wc|ib_sge|ib_send_wr|ib_ud_wr|ib_rdma_wr|ib_atomic_wr|ib_reg_wr|ib_recv_wr|rdma_ah_attr"
types="$types|ib_port_immutable|ib_qp_attr|ib_qp_init_attr|ib_cq_init_attr|rdma_user_mmap_entry|virtqueue|virtio_device"
types="$types|iw_cm_id|iw_cm_event|iw_cm_conn_param"
bindgen "$header" --output "$out/bindings.rs.new" \
    --use-core --ctypes-prefix core::ffi --no-doc-comments --no-prepend-enum-name --no-derive-debug --formatter prettyplease \
    --allowlist-type "$types|vrdma_.*|ib_event_type|ib_access_flags|ib_device_cap_flags|rdma_link_layer|ib_port_state" \
    --allowlist-type 'ib_port_phys_state|ib_gid_type|rdma_ah_attr_type|ib_atomic_cap|ib_sig_type|rdma_driver_id' \
    --allowlist-type 'ib_ah_flags|ib_send_flags|ib_wc_flags|ib_port_capability_mask_bits|ib_qp_attr_mask|rdma_nl_dev_type|ib_mr_type|iw_cm_event_type|ib_kernel_cap_flags|rdma_user_mmap_entry' \
    --allowlist-var 'VRDMA_.*|RDMA_NODE_.*' \
    --allowlist-function 'vrdma_.*|kfree|kvfree|complete|down|up|rtnl_lock|rtnl_unlock|xa_load' \
    --allowlist-function 'virtqueue_(kick|get_buf|disable_cb|enable_cb|is_broken|detach_unused_buf|get_vring_size)' \
    --allowlist-function 'virtqueue_(kick_prepare|notify)' \
    --allowlist-function 'ib_(dealloc_device|register_device|unregister_device|set_device_ops|dispatch_event)' \
    --allowlist-function 'ib_(device_set_netdev|umem_release|umem_find_best_pgsz)' \
    --allowlist-function 'rdma_(roce_rescan_device|read_gid_l2_fields)' \
    --allowlist-function 'rdma_user_mmap_entry_(insert|remove|get|put)' \
    --opaque-type 'ib_user_mad.*|ib_mad.*|ib_umem|net_device|pci_dev|task_struct|mm_struct|vm_area_struct|net|module' \
    --opaque-type 'ib_uverbs_file|virtio_config_ops|file|inode|super_block|net_device_ops|device_driver|bus_type' \
    --opaque-type 'ns_common.*|pid_namespace|user_namespace' \
    -- --target=x86_64-linux-gnu -w '-DKBUILD_MODNAME="virtio_rdma"' $flags
mv "$out/bindings.rs.new" "$out/bindings.rs"

# ["Size of ib_cq"][…size_of::<ib_cq>() - 288usize]; and the same for alignments and offsets of fields.
awk -v RS=';' -v types="^($types)\$" '
    match($0, /"(Size|Alignment|Offset) [^"]*"/) {
        n = split(substr($0, RSTART + 1, RLENGTH - 2), word, " ")
        split(word[n], path, "::")
        if (path[1] !~ types || path[2] ~ /^__bindgen|^_bitfield/ || !match($0, /- *[0-9]+usize\]/)) next
        number = substr($0, RSTART, RLENGTH)
        gsub(/[^0-9]/, "", number)
        sub(/_$/, "", path[2]) # a Rust keyword
        what = word[1] == "Size" ? "sizeof(struct " path[1] ")" : \
            word[1] == "Alignment" ? "__alignof__(struct " path[1] ")" : "offsetof(struct " path[1] ", " path[2] ")"
        print "_Static_assert(" what " == " number ", \"bindgen: " word[n] "\");"
        count++
    }
    END { if (count < 100) { print "bindgen.sh: layout assertions not found" > "/dev/stderr"; exit 1 } }
' "$out/bindings.rs" >"$out/layout.h"
