// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* Reliable datagrams (SRD): queue pairs of the driver's own type. */
#include "verbs-test.h"

#include <arpa/inet.h>
#include <infiniband/virtio_rdma_dv.h>

/* Of the many that send to one. */
#define SENDERS 1000

struct srd {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct region mr;
	struct ibv_ah *ah;
};

static struct ibv_qp *make_srd_qp(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 32, .max_recv_wr = 32, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 32 },
		.qp_type = IBV_QPT_DRIVER,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
				  IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ,
	};
	struct virtio_rdma_dv_qp_init_attr more = { .driver_qp_type = VIRTIO_RDMA_DV_QP_DRIVER_TYPE_SRD };
	struct ibv_qp *qp = MAKE(virtio_rdma_dv_create_qp(ctx, &attr, &more, sizeof(more)));

	ready_ud(qp, QKEY);
	return qp;
}

static struct srd make_srd(int cqe)
{
	struct virtio_rdma_dv_device_attr caps;
	int error = virtio_rdma_dv_query_device(ctx, &caps, sizeof(caps));
	struct ibv_ah_attr to = path_to(gid);
	struct srd srd;

	if (error == EOPNOTSUPP)
		skip("not a device with virtio_rdma_dv");
	EQ(error, 0);
	if (!(caps.device_caps & VIRTIO_RDMA_DV_DEVICE_ATTR_CAPS_SRD))
		skip("the device has no SRD");
	srd.pd = MAKE(ibv_alloc_pd(ctx));
	srd.cq = make_cq(cqe);
	srd.mr = region(srd.pd, 1 << 20, ALL);
	srd.qp = make_srd_qp(srd.pd, srd.cq);
	srd.ah = MAKE(ibv_create_ah(srd.pd, &to));
	return srd;
}

/* Begins a message to a queue pair of this device. What it is, and its data, is said in between. */
static struct ibv_qp_ex *begin(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);

	ibv_wr_start(ex);
	ex->wr_id = id;
	ex->wr_flags = 0;
	return ex;
}

static void end(struct ibv_qp_ex *ex, const struct srd *from, uint32_t qpn, uint32_t length)
{
	ibv_wr_set_ud_addr(ex, from->ah, qpn, QKEY);
	ibv_wr_set_sge(ex, from->mr.mr->lkey, (uintptr_t)from->mr.p, length);
	OK(ibv_wr_complete(ex));
}

TEST(srd_all_operations)
{
	struct srd a = make_srd(128), b = make_srd(128);
	uint64_t there = (uintptr_t)b.mr.p + 4096;
	uint32_t key = b.mr.mr->rkey, to = b.qp->qp_num;
	struct ibv_qp_ex *ex;
	struct ibv_wc wc;

	fill(a.mr.p, 100000, 1);
	RECV(b.qp, 10, &b.mr, 0, 4096);
	ex = begin(a.qp, 1);
	ibv_wr_send_imm(ex, htonl(7));
	end(ex, &a, to, 4096);
	expect_ok(a.cq, 1, SEND);
	wc = expect_ok(b.cq, 10, RECV);
	EQ(wc.byte_len, 4096);
	EQ(wc.src_qp, a.qp->qp_num);
	EQ(wc.wc_flags, IBV_WC_WITH_IMM);
	EQ(ntohl(wc.imm_data), 7);
	CHECK(filled(b.mr.p, 4096, 1));

	ex = begin(a.qp, 2);
	ibv_wr_rdma_write(ex, key, there);
	end(ex, &a, to, 100000);
	expect_ok(a.cq, 2, RDMA_WRITE);
	CHECK(filled(b.mr.p + 4096, 100000, 1));

	fill(a.mr.p, 100000, 2);
	RECV(b.qp, 11, &b.mr, 0, 0);
	ex = begin(a.qp, 3);
	ibv_wr_rdma_write_imm(ex, key, there, htonl(8));
	end(ex, &a, to, 100000);
	expect_ok(a.cq, 3, RDMA_WRITE);
	wc = expect_ok(b.cq, 11, RECV_RDMA_WITH_IMM);
	EQ(wc.byte_len, 100000);
	EQ(ntohl(wc.imm_data), 8);
	CHECK(filled(b.mr.p + 4096, 100000, 2));

	fill(b.mr.p + 4096, 100000, 3);
	ex = begin(a.qp, 4);
	ibv_wr_rdma_read(ex, key, there);
	end(ex, &a, to, 100000);
	EQ(expect_ok(a.cq, 4, RDMA_READ).byte_len, 100000);
	CHECK(filled(a.mr.p, 100000, 3));

	/* ibv_post_send has no place for an address and a remote range. */
	RECV(b.qp, 12, &b.mr, 0, 64);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 5, .from = &a.mr, .length = 64, .ah = a.ah, .qpn = to, .qkey = QKEY);
	expect_ok(a.cq, 5, SEND);
	expect_ok(b.cq, 12, RECV);
	POST_FAILS(EINVAL, a.qp, .opcode = IBV_WR_RDMA_WRITE, .from = &a.mr, .length = 64, .to = &b.mr);
}

/* A message that fails ends nothing but itself. */
TEST(srd_errors_are_of_their_message)
{
	struct srd a = make_srd(128), b = make_srd(128);
	uint64_t there = (uintptr_t)b.mr.p;
	uint32_t key = b.mr.mr->rkey, to = b.qp->qp_num;
	struct ibv_qp_ex *ex;

	ex = begin(a.qp, 1);
	ibv_wr_rdma_write(ex, key + 1, there);
	end(ex, &a, to, 8);
	expect_error(a.cq, 1, REM_ACCESS_ERR);
	ex = begin(a.qp, 2);
	ibv_wr_rdma_read(ex, key, there + (1 << 20));
	end(ex, &a, to, 8);
	expect_error(a.cq, 2, REM_ACCESS_ERR);
	ex = begin(a.qp, 3);
	ibv_wr_send(ex);
	end(ex, &a, to ^ 1, 8);
	expect_error(a.cq, 3, REM_INV_RD_REQ_ERR);
	RECV(b.qp, 10, &b.mr, 0, 4);
	ex = begin(a.qp, 4);
	ibv_wr_send(ex);
	end(ex, &a, to, 8);
	expect_error(a.cq, 4, REM_INV_REQ_ERR);
	expect_error(b.cq, 10, LOC_LEN_ERR);
	ex = begin(a.qp, 5);
	ibv_wr_rdma_write(ex, key, there);
	end(ex, &a, to, 8);
	expect_ok(a.cq, 5, RDMA_WRITE);
	EQ(state_of(a.qp), IBV_QPS_RTS);
	EQ(state_of(b.qp), IBV_QPS_RTS);
}

/* D-SRD-004. A key is worth nothing at a queue pair of another protection domain. */
TEST(srd_keys_are_of_their_domain)
{
	struct srd a = make_srd(128), b = make_srd(128), other = make_srd(128);
	struct ibv_qp_ex *ex = begin(a.qp, 1);

	ibv_wr_rdma_write(ex, b.mr.mr->rkey, (uintptr_t)b.mr.p);
	end(ex, &a, other.qp->qp_num, 8);
	expect_error(a.cq, 1, REM_ACCESS_ERR);
}

/* What has to wait is overtaken. */
TEST(srd_without_receive_is_overtaken)
{
	struct srd a = make_srd(128), b = make_srd(128);
	struct ibv_qp_ex *ex = begin(a.qp, 1);

	ibv_wr_send(ex);
	end(ex, &a, b.qp->qp_num, 8);
	ex = begin(a.qp, 2);
	ibv_wr_rdma_write(ex, b.mr.mr->rkey, (uintptr_t)b.mr.p);
	end(ex, &a, b.qp->qp_num, 8);
	expect_ok(a.cq, 2, RDMA_WRITE);
	expect_none(a.cq);
	RECV(b.qp, 10, &b.mr, 0, 8);
	expect_ok(a.cq, 1, SEND);
	expect_ok(b.cq, 10, RECV);
}

/* Many queue pairs send to one at once. */
TEST(srd_many_to_one)
{
	struct srd a = make_srd(2 * SENDERS), b = make_srd(128);
	struct ibv_qp *senders[SENDERS];
	struct ibv_qp_ex *ex;

	for (int i = 0; i < SENDERS; i++)
		senders[i] = make_srd_qp(a.pd, a.cq);
	for (int i = 0; i < SENDERS; i++) {
		ex = begin(senders[i], i);
		ibv_wr_send(ex);
		end(ex, &a, b.qp->qp_num, 8);
	}
	for (int i = 0; i < SENDERS; i++) {
		RECV(b.qp, i, &b.mr, 0, 8);
		expect_ok(b.cq, i, RECV);
	}
	for (int i = 0; i < SENDERS; i++)
		EQ(wait_wc(a.cq).status, IBV_WC_SUCCESS);
	expect_none(a.cq);
}
