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

static struct ibv_qp *make_srd_qp_of(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t entries)
{
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = entries, .max_recv_wr = entries, .max_send_sge = 2, .max_recv_sge = 2,
			 .max_inline_data = 32 },
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

static struct ibv_qp *make_srd_qp(struct ibv_pd *pd, struct ibv_cq *cq)
{
	return make_srd_qp_of(pd, cq, 32);
}

/* With the way to a GID. */
static struct srd make_srd_to(union ibv_gid there, int cqe)
{
	struct virtio_rdma_dv_device_attr caps;
	int error = virtio_rdma_dv_query_device(ctx, &caps, sizeof(caps));
	struct ibv_ah_attr to = path_to(there);
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

static struct srd make_srd(int cqe)
{
	return make_srd_to(gid, cqe);
}

/* Begins a message to a queue pair of this device. What it is, and its data, is said in between. */
static struct ibv_qp_ex *begin_send(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);

	ibv_wr_start(ex);
	ex->wr_id = id;
	ex->wr_flags = 0;
	return ex;
}

static void end_send(struct ibv_qp_ex *ex, const struct srd *from, uint32_t qpn, uint32_t length)
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
	ex = begin_send(a.qp, 1);
	ibv_wr_send_imm(ex, htonl(7));
	end_send(ex, &a, to, 4096);
	expect_ok(a.cq, 1, SEND);
	wc = expect_ok(b.cq, 10, RECV);
	EQ(wc.byte_len, 4096);
	EQ(wc.src_qp, a.qp->qp_num);
	EQ(wc.wc_flags, IBV_WC_WITH_IMM);
	EQ(ntohl(wc.imm_data), 7);
	CHECK(filled(b.mr.p, 4096, 1));

	ex = begin_send(a.qp, 2);
	ibv_wr_rdma_write(ex, key, there);
	end_send(ex, &a, to, 100000);
	expect_ok(a.cq, 2, RDMA_WRITE);
	CHECK(filled(b.mr.p + 4096, 100000, 1));

	fill(a.mr.p, 100000, 2);
	RECV(b.qp, 11, &b.mr, 0, 0);
	ex = begin_send(a.qp, 3);
	ibv_wr_rdma_write_imm(ex, key, there, htonl(8));
	end_send(ex, &a, to, 100000);
	expect_ok(a.cq, 3, RDMA_WRITE);
	wc = expect_ok(b.cq, 11, RECV_RDMA_WITH_IMM);
	EQ(wc.byte_len, 100000);
	EQ(ntohl(wc.imm_data), 8);
	CHECK(filled(b.mr.p + 4096, 100000, 2));

	fill(b.mr.p + 4096, 100000, 3);
	ex = begin_send(a.qp, 4);
	ibv_wr_rdma_read(ex, key, there);
	end_send(ex, &a, to, 100000);
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

	ex = begin_send(a.qp, 1);
	ibv_wr_rdma_write(ex, key + 1, there);
	end_send(ex, &a, to, 8);
	expect_error(a.cq, 1, REM_ACCESS_ERR);
	ex = begin_send(a.qp, 2);
	ibv_wr_rdma_read(ex, key, there + (1 << 20));
	end_send(ex, &a, to, 8);
	expect_error(a.cq, 2, REM_ACCESS_ERR);
	ex = begin_send(a.qp, 3);
	ibv_wr_send(ex);
	end_send(ex, &a, to ^ 1, 8);
	expect_error(a.cq, 3, REM_INV_RD_REQ_ERR);
	RECV(b.qp, 10, &b.mr, 0, 4);
	ex = begin_send(a.qp, 4);
	ibv_wr_send(ex);
	end_send(ex, &a, to, 8);
	expect_error(a.cq, 4, REM_INV_REQ_ERR);
	expect_error(b.cq, 10, LOC_LEN_ERR);
	ex = begin_send(a.qp, 5);
	ibv_wr_rdma_write(ex, key, there);
	end_send(ex, &a, to, 8);
	expect_ok(a.cq, 5, RDMA_WRITE);
	EQ(state_of(a.qp), IBV_QPS_RTS);
	EQ(state_of(b.qp), IBV_QPS_RTS);
}

/* D-SRD-004. A key is worth nothing at a queue pair of another protection domain. */
TEST(srd_keys_are_of_their_domain)
{
	struct srd a = make_srd(128), b = make_srd(128), other = make_srd(128);
	struct ibv_qp_ex *ex = begin_send(a.qp, 1);

	ibv_wr_rdma_write(ex, b.mr.mr->rkey, (uintptr_t)b.mr.p);
	end_send(ex, &a, other.qp->qp_num, 8);
	expect_error(a.cq, 1, REM_ACCESS_ERR);
}

/* What has to wait is overtaken. */
TEST(srd_without_receive_is_overtaken)
{
	struct srd a = make_srd(128), b = make_srd(128);
	struct ibv_qp_ex *ex = begin_send(a.qp, 1);

	ibv_wr_send(ex);
	end_send(ex, &a, b.qp->qp_num, 8);
	ex = begin_send(a.qp, 2);
	ibv_wr_rdma_write(ex, b.mr.mr->rkey, (uintptr_t)b.mr.p);
	end_send(ex, &a, b.qp->qp_num, 8);
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
		ex = begin_send(senders[i], i);
		ibv_wr_send(ex);
		end_send(ex, &a, b.qp->qp_num, 8);
	}
	for (int i = 0; i < SENDERS; i++) {
		RECV(b.qp, i, &b.mr, 0, 8);
		expect_ok(b.cq, i, RECV);
	}
	for (int i = 0; i < SENDERS; i++)
		EQ(wait_wc(a.cq).status, IBV_WC_SUCCESS);
	expect_none(a.cq);
}

/* Between two ends, which may be in different VMs. */

/* What an end tells the other of a queue pair. */
struct peer {
	union ibv_gid gid;
	uint32_t qpn, rkey;
	uint64_t addr;
};

static struct peer tell(struct link *link, const struct srd *own)
{
	struct peer mine = { gid, own->qp->qp_num, own->mr.mr->rkey, (uintptr_t)own->mr.p }, peer;

	put(link, &mine, sizeof(mine));
	get(link, &peer, sizeof(peer));
	return peer;
}

static union ibv_gid other_gid(struct link *link)
{
	union ibv_gid other;

	put(link, &gid, sizeof(gid));
	get(link, &other, sizeof(other));
	return other;
}

/* Messages back and forth, verified on arrival. */
SIDES(srd_two_ping_pong)
{
	struct srd end = make_srd_to(other_gid(link), 128);
	struct peer peer = tell(link, &end);
	const uint32_t mtu = 128 << port.active_mtu, half = 512 * 1024;
	const uint32_t sizes[] = { 0, 1, 64, mtu - 1, mtu };

	for (unsigned int i = 0; i < 100; i++) {
		uint32_t size = sizes[i % 5];

		RECV(end.qp, 10, &end.mr, half, half);
		meet(link);
		for (int turn = 0; turn < 2; turn++) {
			if (turn == number) {
				struct ibv_qp_ex *ex = begin_send(end.qp, 1);

				fill(end.mr.p, size, i + turn);
				ibv_wr_send_imm(ex, htonl(i));
				end_send(ex, &end, peer.qpn, size);
				expect_ok(end.cq, 1, SEND);
			} else {
				struct ibv_wc wc = expect_ok(end.cq, 10, RECV);

				EQ(wc.byte_len, size);
				EQ(wc.src_qp, peer.qpn);
				EQ(ntohl(wc.imm_data), i);
				CHECK(filled(end.mr.p + half, size, i + turn));
			}
			meet(link);
		}
	}
}

/* Both read and write the other's memory, and what is not granted harms nothing. */
SIDES(srd_two_rdma)
{
	struct srd end = make_srd_to(other_gid(link), 128);
	struct peer peer = tell(link, &end);
	const uint32_t quarter = 256 * 1024;
	struct ibv_qp_ex *ex;

	fill(end.mr.p, quarter, number);
	RECV(end.qp, 10, NULL, 0, 0);
	meet(link);
	ex = begin_send(end.qp, 1);
	ibv_wr_rdma_read(ex, peer.rkey, peer.addr);
	ibv_wr_set_ud_addr(ex, end.ah, peer.qpn, QKEY);
	ibv_wr_set_sge(ex, end.mr.mr->lkey, (uintptr_t)end.mr.p + quarter, quarter);
	OK(ibv_wr_complete(ex));
	EQ(expect_ok(end.cq, 1, RDMA_READ).byte_len, quarter);
	CHECK(filled(end.mr.p + quarter, quarter, !number));
	ex = begin_send(end.qp, 2);
	ibv_wr_rdma_write(ex, peer.rkey, peer.addr + 2 * quarter);
	end_send(ex, &end, peer.qpn, quarter);
	expect_ok(end.cq, 2, RDMA_WRITE);
	meet(link);
	CHECK(filled(end.mr.p + 2 * quarter, quarter, !number));
	ex = begin_send(end.qp, 3);
	ibv_wr_rdma_write_imm(ex, peer.rkey, peer.addr + 3 * quarter, htonl(7));
	end_send(ex, &end, peer.qpn, quarter);
	for (int i = 0; i < 2; i++) {
		struct ibv_wc wc = wait_wc(end.cq);

		EQ(wc.status, IBV_WC_SUCCESS);
		if (wc.wr_id == 3)
			continue;
		EQ(wc.wr_id, 10);
		EQ(wc.byte_len, quarter);
		EQ(ntohl(wc.imm_data), 7);
		CHECK(filled(end.mr.p + 3 * quarter, quarter, !number));
	}
	ex = begin_send(end.qp, 4);
	ibv_wr_rdma_write(ex, peer.rkey ^ 0x55, peer.addr);
	end_send(ex, &end, peer.qpn, 8);
	expect_error(end.cq, 4, REM_ACCESS_ERR);
	EQ(state_of(end.qp), IBV_QPS_RTS);
	meet(link);
}

/* A thousand queue pairs of one end send to one of the other. */
SIDES(srd_two_incast)
{
	enum { EACH = 4, AT_ONCE = 512 };
	struct srd end = make_srd_to(other_gid(link), EACH * SENDERS);
	struct peer peer = tell(link, &end);
	uint32_t numbers[SENDERS];

	if (number == 0) {
		struct ibv_qp *to = make_srd_qp_of(end.pd, end.cq, AT_ONCE);
		uint32_t qpn = to->qp_num;
		int posted = 0, came[SENDERS] = {};

		get(link, numbers, sizeof(numbers));
		put(link, &qpn, sizeof(qpn));
		for (; posted < AT_ONCE / 2; posted++)
			RECV(to, posted, &end.mr, 0, 64);
		for (int i = 0; i < EACH * SENDERS; i++) {
			struct ibv_wc wc = wait_wc(end.cq);
			int from = 0;

			EQ(wc.status, IBV_WC_SUCCESS);
			while (from < SENDERS && numbers[from] != wc.src_qp)
				from++;
			CHECK(from < SENDERS);
			CHECK(!(came[from] & 1 << ntohl(wc.imm_data)));
			came[from] |= 1 << ntohl(wc.imm_data);
			if (posted < EACH * SENDERS)
				RECV(to, posted++, &end.mr, 0, 64);
		}
		for (int i = 0; i < SENDERS; i++)
			EQ(came[i], (1 << EACH) - 1);
	} else {
		struct ibv_qp *senders[SENDERS];

		for (int i = 0; i < SENDERS; i++) {
			senders[i] = make_srd_qp(end.pd, end.cq);
			numbers[i] = senders[i]->qp_num;
		}
		put(link, numbers, sizeof(numbers));
		get(link, &peer.qpn, sizeof(peer.qpn));
		for (int n = 0; n < EACH; n++) {
			for (int i = 0; i < SENDERS; i++) {
				struct ibv_qp_ex *ex = begin_send(senders[i], i);

				ibv_wr_send_imm(ex, htonl(n));
				end_send(ex, &end, peer.qpn, 64);
			}
		}
		for (int i = 0; i < EACH * SENDERS; i++)
			EQ(wait_wc(end.cq).status, IBV_WC_SUCCESS);
	}
	meet(link);
	expect_none(end.cq);
}

/* Of the queue pairs of both ends, each sends to all. */
SIDES(srd_two_all_to_all)
{
	enum { EACH = 32, ALL_OF_THEM = 2 * EACH };
	struct srd end = make_srd_to(other_gid(link), 4 * EACH * ALL_OF_THEM);
	struct ibv_ah_attr own = path_to(gid);
	struct ibv_ah *ahs[2] = { end.ah, end.ah };
	struct ibv_qp *qps[EACH];
	uint32_t numbers[2][EACH];
	uint64_t came[EACH] = {};

	ahs[number] = MAKE(ibv_create_ah(end.pd, &own));
	for (int i = 0; i < EACH; i++) {
		qps[i] = make_srd_qp_of(end.pd, end.cq, ALL_OF_THEM);
		numbers[number][i] = qps[i]->qp_num;
		for (int n = 0; n < ALL_OF_THEM; n++)
			RECV(qps[i], ALL_OF_THEM, &end.mr, 4096, 64);
	}
	put(link, numbers[number], sizeof(numbers[number]));
	get(link, numbers[!number], sizeof(numbers[!number]));
	for (int to = 0; to < ALL_OF_THEM; to++) {
		int side = to / EACH;

		end.ah = ahs[side];
		for (int i = 0; i < EACH; i++) {
			struct ibv_qp_ex *ex = begin_send(qps[i], 1);

			ibv_wr_send_imm(ex, htonl(number * EACH + i));
			end_send(ex, &end, numbers[side][to % EACH], 64);
		}
	}
	for (int i = 0; i < 2 * EACH * ALL_OF_THEM; i++) {
		struct ibv_wc wc = wait_wc(end.cq);
		int at = 0;

		EQ(wc.status, IBV_WC_SUCCESS);
		if (wc.wr_id == 1)
			continue;
		while (at < EACH && numbers[number][at] != wc.qp_num)
			at++;
		CHECK(at < EACH);
		CHECK(!(came[at] & 1ull << ntohl(wc.imm_data)));
		came[at] |= 1ull << ntohl(wc.imm_data);
	}
	for (int i = 0; i < EACH; i++)
		EQ(came[i], UINT64_MAX);
	meet(link);
	expect_none(end.cq);
}
